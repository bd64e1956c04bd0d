"""The mixing of the optimizer's moments: after a mix, each side fetches a part of its partner's moments.

    we:       mixed --Fetch-->               ReceiveMoments --on_moments--> MixMoments
    partner:           copy its moments --snapshotted--> Serving, SendMoments --served-->

Each side moves half of the way to what it gets, whatever the other does (:mod:`gossip.arithmetic.moments`). Moments are
running means, which forget, so that nothing has to be kept in balance and a failure needs no answer. The parts follow
one another, so that all elements are mixed once in :attr:`MomentForm.period_steps`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gossip.arithmetic.moments import MomentForm
from gossip.codecs.choice import NOMINAL_STEPS
from gossip.config import Config
from gossip.effects import CopyMoments, Effect, MixMoments, Notice, ReceiveMoments, Release, Send, SendMoments
from gossip.exchange.session import Local
from gossip.ids import PeerId, short
from gossip.recent import Recent
from gossip.state_transfer.donating import serving_time_s
from gossip.wire.messages import Abort, Busy, Fetch, Refuse, Serving

MOMENTS = "moments"  # Code of a Refuse: this member mixes no such moments.
MAX_SERVED = 2  # Members that are served at once, so that their copies take at most two vectors.
MAX_DECLINED = 256  # Members to remember that mix no such moments: as many as there may be links.


@dataclass(slots=True)
class MomentPart:
    """Elements [start, stop) of each moment that ``member`` gives us, or gets from us, until ``deadline``."""

    member: PeerId
    start: int
    stop: int
    deadline: float
    is_copied: bool = False  # Our copy exists, and is being sent.


class MomentMixing:
    """The moments that one peer fetches and serves."""

    def __init__(self, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.local, self.config, self.new_session = local, config, new_session
        self.form: MomentForm | None = None  # None: nothing is mixed.
        self.next_start = 0  # The first element of the part to fetch next.
        self.fetched: dict[int, MomentPart] = {}  # At most one, by session.
        self.served: dict[int, MomentPart] = {}
        self.declined = Recent[PeerId, None](MAX_DECLINED)
        self.is_told = False  # The user knows of a member with other moments.
        self.mixed_count = 0  # Parts that were mixed into our moments.

    def set_form(self, form: MomentForm | None) -> list[Effect]:
        """Set the form of our optimizer's moments; None if they are not mixed."""
        if form == self.form:
            return []
        self.form, self.next_start = form, 0
        self.declined.clear()
        return self.drop()

    def on_mixed(self, partner: PeerId, now: float) -> list[Effect]:
        """Fetch the next part from a partner with which we have just mixed our weights."""
        form, local = self.form, self.local
        is_busy = self.fetched or local.settling or local.paused or not local.ready
        if form is None or is_busy or partner in self.declined:
            return []
        start, stop = form.next_part(self.next_start, local.steps_per_mix or NOMINAL_STEPS)
        session, seconds = self.new_session(), serving_time_s(self.config, len(form.names) * (stop - start))
        self.fetched[session] = MomentPart(partner, start, stop, now + seconds)
        return [
            ReceiveMoments(session, partner, form, start, stop),
            Send(partner, Fetch(session, form.names, start, stop, form.code)),
        ]

    def on_serving(self, sender: PeerId, serving: Serving) -> list[Effect]:
        """Handle the begin of a partner's stream, which is of no use if it is of another run."""
        part = self.fetched.get(serving.session)
        if part is None or part.member != sender or serving.run_id == self.local.run_id:
            return []
        return [Send(sender, Abort(serving.session, MOMENTS)), *self.end(serving.session)]

    def on_moments(self, session: int) -> list[Effect]:
        """Handle a part that has arrived whole: mix it."""
        part = self.fetched.get(session)
        if part is None:
            return []
        self.next_start = part.stop
        self.mixed_count += 1
        return [MixMoments(session), *self.end(session)]

    def on_refused(self, sender: PeerId, session: int, code: str = "") -> list[Effect]:
        """Handle a Busy, Refuse or Abort of a partner, or the end of a member's fetch."""
        part = self.fetched.get(session) or self.served.get(session)
        if part is None or part.member != sender:
            return []
        if code != MOMENTS:
            return self.end(session)
        self.declined[sender] = None
        return [*self.end(session), *self.tell_of_others(sender)]

    def tell_of_others(self, member: PeerId) -> list[Effect]:
        """Tell the user, once, that a member's moments are not mixed with ours."""
        if self.is_told or self.config.mix_state == "off":
            return []
        self.is_told = True
        ours = "has no moments that are mixed" if self.form is None else f"has {', '.join(self.form.names)}"
        return [
            Notice(
                "moments",
                f"The optimizer of this node {ours}, and that of {short(member)} has others: their weights are mixed, "
                "their moments are not. Give all nodes one optimizer and one mix_state.",
            )
        ]

    # -- the partner's side --------------------------------------------------------------------------------------
    def on_fetch(self, sender: PeerId, fetch: Fetch, now: float) -> list[Effect]:
        """Handle a Fetch: copy the elements, unless our optimizer has other moments, or we have no time."""
        form, local, session = self.form, self.local, fetch.session
        if form is None and not local.mixed_steps:  # Its optimizer has no state yet.
            return [Send(sender, Busy(session))]
        if form is None or (form.names, form.code) != (fetch.optimizer_keys, fetch.moments):
            return [Send(sender, Refuse(session, MOMENTS)), *self.tell_of_others(sender)]
        elements = fetch.stop - fetch.start
        if not 0 < elements <= form.part_elements(len(form.names)) or fetch.stop > form.elements:
            return [Send(sender, Refuse(session, "range"))]
        is_idle = now - local.boundary_at > self.config.boundary_patience_s  # Its loop takes no step.
        if len(self.served) >= MAX_SERVED or not local.ready or local.settling or local.paused or is_idle:
            return [Send(sender, Busy(session))]
        seconds = serving_time_s(self.config, len(form.names) * elements)
        self.served[session] = MomentPart(sender, fetch.start, fetch.stop, now + seconds)
        return [CopyMoments(session, form, fetch.start, fetch.stop)]

    def on_snapshotted(self, session: int) -> list[Effect]:
        """Handle the copy of a part, which is streamed now."""
        part, form, local = self.served.get(session), self.form, self.local
        if part is None or form is None or part.is_copied:
            return []
        part.is_copied = True
        return [
            Send(part.member, Serving(session, local.version, local.run_id, form.names, ())),
            SendMoments(session, part.member, form, part.start, part.stop),
        ]

    def on_served(self, session: int) -> list[Effect]:
        """Handle a part that was streamed whole."""
        return self.end(session) if session in self.served else []

    # -- endings -------------------------------------------------------------------------------------------------
    def end(self, session: int) -> list[Effect]:
        """Forget a part, fetched or served."""
        known = self.fetched.pop(session, None) or self.served.pop(session, None)
        return [] if known is None else [Release(session)]

    def fail(self, session: int) -> list[Effect]:
        """Forget a part that will not come or cannot be given, and tell the other side."""
        part = self.fetched.get(session) or self.served.get(session)
        return [] if part is None else [Send(part.member, Abort(session, "ended")), *self.end(session)]

    def drop(self) -> list[Effect]:
        """Drop all parts, since the weights or the optimizer are replaced."""
        return [effect for session in [*self.fetched, *self.served] for effect in self.fail(session)]

    def on_unlinked(self, peer: PeerId) -> list[Effect]:
        """Handle the loss of the last link to ``peer``."""
        self.declined.pop(peer, None)
        sessions = [session for session, part in self.parts() if part.member == peer]
        return [effect for session in sessions for effect in self.end(session)]

    def parts(self) -> list[tuple[int, MomentPart]]:
        """Return all parts by session."""
        return [*self.fetched.items(), *self.served.items()]

    def member_of(self, session: int) -> PeerId | None:
        """Return the other side of a session, None if there is no such session."""
        part = self.fetched.get(session) or self.served.get(session)
        return None if part is None else part.member

    def tick(self, now: float) -> list[Effect]:
        """End the parts that are late."""
        late = [session for session, part in self.parts() if part.deadline <= now]
        return [effect for session in late for effect in self.fail(session)]

    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`tick`."""
        return min((part.deadline for _, part in self.parts()), default=math.inf)
