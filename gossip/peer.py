"""Peer: the decisions of one member behind receive, tick and deadline. Both drivers run it.

:mod:`gossip.effects` defines the terms. A *mix* is an exchange, or one with each of several partners.
"""

import math
import random
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gossip.arithmetic.moments import MomentForm
from gossip.arithmetic.sketch import Floats
from gossip.config import Config
from gossip.discovery.meetings import Meetings
from gossip.discovery.reachability import Reachability
from gossip.discovery.seeds import Bootstrap, Listening, Seeds
from gossip.discovery.sightings import Sighting
from gossip.effects import Dial, Effect, Send
from gossip.exchange import reservation
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.progress import RunProgress
from gossip.exchange.session import Local, LocalModel
from gossip.exchange.transitions import Event
from gossip.handlers import HANDLERS
from gossip.ids import Address, MemberRecord, PeerId
from gossip.initiator import Initiator
from gossip.membership.members import MEMBERSHIP_MESSAGES, Members
from gossip.membership.protocol import Membership
from gossip.misbehaviour import MisbehaviourLog
from gossip.schedule import Schedule
from gossip.selection.partners import Partners
from gossip.selection.registry import selector_of
from gossip.selection.rule import Selector
from gossip.state_transfer.donating import Donor
from gossip.state_transfer.ending import Ending
from gossip.state_transfer.joining import Newcomer, Phase
from gossip.state_transfer.moments import MomentMixing
from gossip.state_transfer.own_run import OwnRun, RunState
from gossip.state_transfer.runs import RunChoice
from gossip.view import PeerView
from gossip.wire.messages import Message, Reached

BOOK_DIALS = 4  # Members of the address book, those of an earlier life, to dial at once after a restart.
NO_CONTACTS = Bootstrap()  # The start of a peer that knows no member.
IDLE = Phase.IDLE  # Reading an Enum's attributes is slow.


class Peer:
    """One member of a swarm, without I/O: methods take ``now`` (seconds, monotonic) and return effects in order.

    Methods ``on_<event>`` are reports of the driver. CONTRACT.md says what a driver owes a peer, and which of its parts
    a driver reads.

    Args:
        members: The member list, which holds our own record.
        config: The configuration.
        model: The model that exchanges carry.
        rng: The source of all random choices.
        bootstrap: The seeds, the address book and the terms of the start.
        selector: The partner selection; by default that of ``config``, which must not name a file.
        now: The current time.
    """

    id: PeerId
    config: Config
    view: PeerView  # What a driver reads between two calls.
    local: Local  # The state of this node that several parts read.
    membership: Members  # The members, and our own record.
    partners: Partners  # The choice of partners.
    schedule: Schedule  # The times of mixes.
    initiator: Initiator  # The mixes that we begin.
    exchanges: Exchanges[Any]  # The mixes in progress.
    run_choice: RunChoice  # The choice of the run whose weights to have.
    own_run: OwnRun  # The run whose weights we have.
    joining: Newcomer  # The weights that we fetch.
    donating: Donor  # The weights that we give.
    moments: MomentMixing  # The optimizer's moments that we mix.
    ending: Ending  # The votes on the end of the run.
    seeds: Seeds  # The addresses through which we find the swarm.
    reach: Reachability  # The test of whether others can dial us.
    meetings: Meetings  # Links between undialable members.
    misbehaviour: MisbehaviourLog  # The faults of others that no honest peer commits so often.

    def __init__(
        self, members: Members, config: Config, model: LocalModel, *, rng: random.Random,
        bootstrap: Bootstrap = NO_CONTACTS, selector: Selector | None = None, now: float,
    ) -> None:  # fmt: skip
        me = members.me
        self.id, self.config, self.rng = me.id, config, rng
        self.local = Local(
            model.fingerprint, model.elements, model.trained_elements, model.frozen_elements, model.bits_elements,
            run_id=me.run_id, boundary_at=now, machine=model.machine, steps_per_mix=config.first_interval,
            progress=RunProgress(config.first_interval),
        )  # fmt: skip
        self.membership, self.misbehaviour = members, members.misbehaviour
        self.linked_peers: dict[PeerId, float] = {}  # When each linked member last had us dial it; -infinity for never.
        # Mixes.
        self.partners = Partners(
            me.id, members, self.local, config, rng, self.linked_peers.__contains__,
            selector or selector_of(config),
        )  # fmt: skip
        new_session = partial(rng.getrandbits, 62)
        self.exchanges = Exchanges(me.id, self.local, config, new_session, self.partners, reservation)
        self.exchanges.misbehaviour = self.misbehaviour
        self.schedule = Schedule(config, rng)
        # Weights of a run.
        self.joining = Newcomer(self.local, config, new_session)
        self.joining.abandon_exchanges = self.exchanges.abandon
        self.donating = Donor(self.local, config)
        self.moments = MomentMixing(self.local, config, new_session)
        self.ending = Ending(self.local, members, bootstrap.finished)
        self.own_run = OwnRun(
            members, self.exchanges, self.joining, self.donating, self.moments, self.ending, self.schedule
        )
        self.run_choice = RunChoice(self.joining, members, self.linked_peers, self.own_run, rng, now)
        self.run_choice.begin(bootstrap.must_join, bootstrap.wait_until, bootstrap.completed)
        self.joining.find_donors = self.run_choice.donors
        self.joining.has_unmet_members = lambda: len(members.alive()) > len(members.contacted())
        self.initiator = Initiator(self.exchanges, self.partners, self.schedule, self.joining, rng)
        # The way into the swarm.
        self.seeds = Seeds(bootstrap.seeds, dict(bootstrap.expected), config, now, bootstrap.looks_up)
        self.run_choice.is_seed_busy = lambda: self.seeds.busy
        self.sightings: dict[PeerId, Sighting] = {}  # Of linked members.
        self.reach = Reachability(members, self.linked_peers, self.sightings, config.internal.opens_ports)
        signer = members if isinstance(members, Membership) else None  # A simulator's sampler signs nothing.
        self.meetings = Meetings(signer, self.linked_peers, self.sightings, config.internal.max_tunnels, rng)
        members.restore(bootstrap.book, now)
        self.may_join = bool(bootstrap.seeds or bootstrap.book or bootstrap.looks_up)  # There may be a run to join.
        self.view = PeerView(self.local, members, self.exchanges, self.joining, self.donating, self.moments)

    # -- messages and time ---------------------------------------------------------------------------------------
    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Handle a message. Raise a RemoteError if no correct peer sends it."""
        kind = type(message)
        if kind in MEMBERSHIP_MESSAGES:
            return self.membership.receive(sender, message, now)
        handler = HANDLERS.get(kind)
        if handler is None:
            return []
        effects = handler(self, sender, message, now)
        return effects + self.follow_up(now) if self.needs_follow_up else effects

    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`tick`. Drivers read it after every call, so empty parts are skipped."""
        if self.local.left:
            return math.inf
        soonest = min(self.run_choice.deadline, self.membership.deadline)
        for exchange in self.exchanges.table.values():
            if exchange.timer_at < soonest:
                soonest = exchange.timer_at
        if self.joining.phase is not IDLE:
            soonest = min(soonest, self.joining.next_deadline)
        elif self.schedule.due_at < soonest:
            soonest = min(soonest, self.initiator.deadline)
        if self.seeds.deadline < soonest:
            soonest = self.seeds.deadline
        reach = self.reach
        if reach.next_ping_at < soonest or reach.decide_at < soonest or reach.next_round_at < soonest:
            soonest = reach.deadline
        if self.sightings:
            soonest = min(soonest, self.meetings.deadline)
        if self.donating.table:
            soonest = min(soonest, self.donating.deadline)
        if self.moments.fetched or self.moments.served:
            soonest = min(soonest, self.moments.deadline)
        trial = self.own_run.trial
        return trial.deadline if trial.deadline < soonest else soonest

    def tick(self, now: float) -> list[Effect]:
        """Run the timers that are due."""
        if self.local.left:
            return []
        effects = self.membership.tick(now) if now >= self.membership.deadline else []
        if self.exchanges.table:
            effects += self.exchanges.tick(now)
            effects += self.exchanges.leave_lost_members(self.membership.state, now)
        if self.joining.phase is not IDLE:
            effects += self.joining.tick(now)
        if self.donating.table:
            effects += self.donating.tick(now)
        effects += self.moments.tick(now)
        if now >= self.seeds.deadline:
            listening = Listening(self.membership, self.linked_peers)
            # A member that avoids a run goes on looking for others of the next one.
            has_link = bool(self.linked_peers) and (self.local.ready or not self.joining.avoided_runs)
            effects += self.seeds.tick(now, has_link, listening, self.rng)
        if now >= self.reach.deadline:
            effects += self.reach.tick(now)
        if self.sightings:
            effects += self.meetings.tick(now)
        if now >= self.run_choice.deadline:
            effects += self.run_choice.tick(now)
        if now >= self.own_run.trial.deadline:
            effects += self.own_run.end_trial(self.own_run.trial.verdict(), now)
        if now >= self.schedule.due_at:
            effects += self.initiator.begin(now)
        return effects + self.follow_up(now) if self.needs_follow_up else effects

    @property
    def needs_follow_up(self) -> bool:
        """Return True if :meth:`follow_up` has something to do."""
        exchanges = self.exchanges
        may_begin = exchanges.has_freed_slot or exchanges.is_reservation_due
        has_ended = exchanges.mixed_partners or exchanges.has_given_up
        return bool(may_begin or has_ended or self.joining.phase is not IDLE or self.misbehaviour.news)

    def follow_up(self, now: float) -> list[Effect]:
        """Do what follows from the other effects of a call.

        Exchanges may have ended: credit their partners, and schedule the next mix. A transfer may need other donors.
        """
        exchanges, joining = self.exchanges, self.joining
        effects: list[Effect] = []
        if self.misbehaviour.news:
            effects += self.misbehaviour.take()
        if exchanges.mixed_partners:
            for partner in exchanges.mixed_partners:
                self.partners.note_success(partner)
                self.membership.on_proof_of_life(partner, now)
            self.ending.note_partners(exchanges.mixed_partners)
            effects += self.moments.on_mixed(exchanges.mixed_partners[-1], now)
        effects += self.initiator.follow_up(now)
        if joining.phase is not IDLE and joining.is_starved and joining.deadline <= now:
            effects += joining.on_starved(self.run_choice.donors(joining.run_id), now)
        return effects

    # -- start and end -------------------------------------------------------------------------------------------
    def start(self, now: float) -> list[Effect]:
        """Begin a run, or look for one: dial the seeds and members of the address book."""
        effects = self.own_run.hash_frozen()
        if not self.may_join and not self.run_choice.must_join:
            return effects + self.own_run.begin(now, "No seed was given: this node starts a swarm.")
        effects += self.seeds.tick(now, False, (), self.rng)
        dials = [Dial(record.address, record.id) for record in self.membership.book() if record.address is not None]
        return [*effects, *self.rng.sample(dials, min(BOOK_DIALS, len(dials)))]

    def continue_from(self, earlier: RunState, now: float) -> None:
        """Continue the run of an earlier peer of this node, which failed.

        Call it before :meth:`start`, with a record that has the earlier steps and samples and a higher incarnation.
        """
        self.own_run.continue_from(earlier, now)
        self.run_choice.check_again()
        self.initiator.moved_steps = earlier.steps
        self.may_join = True
        if not earlier.ready and not earlier.sound:
            self.run_choice.on_spoiled(now)

    def add_founders(self, records: Iterable[MemberRecord], now: float) -> None:
        """Add members that start together and know of us too, like those of one launcher."""
        if isinstance(self.membership, Membership):
            self.membership.add_founders(records, now)

    def hand_over(self, now: float) -> list[Effect]:
        """Mix with members that stay before we leave, so that they keep what only this peer has learned.

        ``view.is_handing_over`` says how long to wait for it.
        """
        return self.initiator.hand_over(len(self.membership.contacted()), now)

    def leave(self, now: float) -> list[Effect]:
        """Announce LEFT with the last counts, which no later record can hold."""
        self.own_run.publish_counts(now)
        self.local.left = True
        return [*self.own_run.end_transfers(), *self.membership.leave(now)]

    # -- what the user wants -------------------------------------------------------------------------------------
    def resume(self, run_id: bytes, samples: int, version: float, now: float, finished: bool = False) -> list[Effect]:
        """Note that the weights now come from a checkpoint; see :meth:`OwnRun.resume` for the arguments."""
        self.run_choice.check_again()
        return self.own_run.resume(run_id, samples, version, now, finished)

    def merge(self, run_id: bytes, now: float) -> list[Effect]:
        """Take this run's weights because the user wants it, whatever its samples."""
        self.run_choice.consent(run_id, now)
        return []

    def finish(self, now: float) -> list[Effect]:
        """Mark the run as finished. Newcomers learn it with the weights, others by a majority vote."""
        self.ending.finish(now)
        return []

    def count_votes(self, now: float) -> list[Effect]:
        """Count the votes on the end of the run. Call it once a second or so."""
        return self.ending.count_votes(now)

    def settle(self, on: bool, now: float) -> list[Effect]:
        """Mix with members that settle until all hold the same vector (True), or as configured (False)."""
        self.local.settling, self.local.paused = on, False
        self.local.boundary_at = now
        self.schedule.retry_at = 0.0
        return [*self.exchanges.begin_settling(), *self.initiator.begin(now)] if on else []

    def pause(self, now: float, drops: bool = False) -> list[Effect]:
        """Begin and accept no exchange until :meth:`settle`, so that the weights stay as they are.

        With ``drops`` exchanges in progress are dropped, because they are for other weights.
        """
        self.local.paused = True
        return [*self.exchanges.begin_settling(), *(self.exchanges.abandon() if drops else [])]

    def publish_figures(self, packed: bytes, now: float, is_urgent: bool = False) -> list[Effect]:
        """Publish the user's packed figures in our record, for other nodes' users; empty bytes withdraw them.

        With ``is_urgent`` linked members get them at once.
        """
        self.membership.update_me(now, extra=(packed,) if packed else ())
        if is_urgent and isinstance(self.membership, Membership):
            self.membership.announce(now)
        return []

    # -- links ---------------------------------------------------------------------------------------------------
    def on_linked(
        self, peer: PeerId, record: MemberRecord, now: float, sighting: Sighting | None = None
    ) -> list[Effect]:
        """Handle a link to ``peer``, whose Hello brought ``record``. ``sighting``: where both sides see each other."""
        effects = self.membership.on_linked(peer, record, now)
        self.linked_peers.setdefault(peer, -math.inf)
        if sighting is not None:
            self.sightings[peer] = sighting
            self.meetings.on_linked(peer, now)
        self.partners.back_off.note_sign_of_life(peer)
        effects += self.exchanges.on_linked(peer, now)
        effects += self.reach.ask(peer, now)
        self.reach.refresh_homes(now)
        self.run_choice.on_linked(now)
        return effects

    def on_unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """Handle the end of the last link to ``peer``. ``orderly``: it was closed as idle, which is no fault."""
        self.linked_peers.pop(peer, None)
        self.sightings.pop(peer, None)
        effects = self.membership.on_unlinked(peer, now, orderly)
        effects += self.exchanges.on_unlinked(peer, now, orderly)
        effects += self.joining.on_unlinked(peer, now)
        effects += self.donating.on_unlinked(peer)
        effects += self.moments.on_unlinked(peer)
        self.reach.refresh_homes(now)
        self.meetings.on_unlinked(peer)
        if not self.linked_peers:
            self.seeds.on_last_link_lost(now)
        return effects + self.follow_up(now)

    def on_dial_failed(self, peer: PeerId | None, now: float) -> list[Effect]:
        """Handle a failed dial of ``peer`` (None: a seed): no answer, or one by another peer."""
        if peer is None or peer in self.linked_peers:
            return []
        effects = self.membership.on_dial_failed(peer, now)
        effects += self.exchanges.on_unlinked(peer, now)
        effects += self.joining.on_unlinked(peer, now)
        return effects + self.follow_up(now)

    def on_dial_tried(self, asker: PeerId, ok: bool, now: float) -> list[Effect]:
        """Tell ``asker`` whether its address accepted our connection."""
        return [Send(asker, Reached(ok))]

    def on_not_met(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle a connection to an undialable member that did not come about."""
        return self.meetings.on_not_met(peer, now)

    def on_port(self, address: Address | None, detail: str, now: float) -> list[Effect]:
        """Handle our router's answer: the address that it passes on to us, or None and a sentence that says why."""
        return self.reach.on_port(address, detail, now)

    def on_tunnel(self, name: bytes, is_open: bool) -> list[Effect]:
        """Handle a tunnel through this node that both sides have joined, or that has ended."""
        return self.meetings.on_tunnel(name, is_open)

    def on_seed_busy(self, seed: Address) -> None:
        """Note that this seed accepted a connection and closed it."""
        self.seeds.on_busy(seed)

    def on_seeds_found(self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId]) -> list[Effect]:
        """Replace the seeds after a look-up. A peer without links dials the new ones."""
        new_seeds = self.seeds.renew(seeds, expected)
        return [] if self.linked_peers else [self.seeds.dial(seed) for seed in new_seeds]

    def on_own_seed(self, seed: Address) -> None:
        """Drop a seed that is this peer itself, so that it does not wait for it."""
        self.seeds.renew(tuple(other for other in self.seeds.seeds if other != seed), self.seeds.expected)

    # -- the training loop ---------------------------------------------------------------------------------------
    def on_stepped(self, steps: int, samples: int, loss: float | None, now: float) -> list[Effect]:
        """Handle a step boundary with this life's counts: at ``due_steps`` and about every quarter of a second."""
        self.local.boundary_at = now
        self.update_counts(steps, samples)
        local = self.local
        self.membership.update_me(
            now, steps=steps, samples=samples, progress=local.progress.samples, loss=loss, version=local.version
        )  # fmt: skip
        is_passed = self.own_run.trial.on_loss(steps, loss)
        if is_passed is not None:  # Until a trial of other weights has a verdict it is None.
            return self.own_run.end_trial(is_passed, now)
        return self.initiator.begin(now)

    def update_counts(self, steps: int, samples: int) -> None:
        """Update the counts of the training loop, at a boundary or not. Older reports are ignored.

        Call it before an Offer is received: stale versions would give equal peers too little weight in the mix.
        """
        self.own_run.update_counts(steps, samples)

    def note_boundary(self, when: float) -> None:
        """Note a step boundary without a report."""
        self.local.boundary_at = max(self.local.boundary_at, when)

    def set_optimizer(self, keys: tuple[str, ...], scalars: tuple[tuple[str, float], ...]) -> None:
        """Set the parts of the optimizer's state that a newcomer can get."""
        self.local.optimizer_keys, self.local.optimizer_scalars = keys, scalars

    def set_moments(self, form: MomentForm | None) -> list[Effect]:
        """Set the optimizer's moments that are mixed; None if none are."""
        return self.moments.set_form(form)

    def on_spoiled(self, session: int | None, now: float, tensor: str = "") -> list[Effect]:
        """Handle weights with NaN or infinity in a tensor, seen in this snapshot (None: by the training loop).

        They are given to no peer, and this peer is not ready until the swarm's weights have replaced them.
        """
        effects = [] if session is None else self.end_snapshot(session)
        if self.local.ready and self.joining.phase is not Phase.ADOPTING:  # The trial judges weights on trial.
            self.run_choice.on_spoiled(now)
            effects += self.own_run.on_spoiled(now, tensor)
        return effects + self.follow_up(now)

    def on_frozen_changed(self, now: float) -> list[Effect]:
        """Handle frozen weights that the program has changed: they are hashed again."""
        return self.own_run.hash_frozen()

    def on_mended(self, now: float) -> list[Effect]:
        """Handle weights that the training loop has made finite again by itself."""
        return self.own_run.on_mended(now)

    # -- snapshots and streams -----------------------------------------------------------------------------------
    def on_snapshotted(self, session: int, now: float, mass: float = 0.0, moved: float = math.nan) -> list[Effect]:
        """Handle a snapshot that took push-sum ``mass`` from the model, which has 1 at first.

        ``moved`` is the norm of the local steps since the last snapshot; NaN if unknown.
        """
        self.local.boundary_at = now
        self.initiator.on_moved(moved)
        if session in self.donating.table:
            return self.donating.on_snapshotted(session)
        if session in self.moments.served:
            return self.moments.on_snapshotted(session)
        effects = self.exchanges.route_report(Event.SNAPSHOTTED, session, now, mass)
        return effects + self.follow_up(now) if self.needs_follow_up else effects

    def on_recalled(self, session: int, now: float) -> list[Effect]:
        """Handle a copy for a newcomer that was not taken at a boundary: an earlier snapshot, or frozen weights."""
        return self.donating.on_snapshotted(session)

    def on_not_taken(self, session: int, now: float) -> list[Effect]:
        """Handle a snapshot that cannot be taken for lack of memory: its session ends."""
        return self.end_snapshot(session) + self.follow_up(now)

    def end_snapshot(self, session: int) -> list[Effect]:
        """End the exchange or the served piece whose snapshot cannot be used."""
        if session in self.donating.table:
            return self.donating.abandon([session])
        if session in self.moments.served:
            return self.moments.fail(session)
        return self.exchanges.route_report(Event.SPOILED, session)

    def on_streamed(
        self, session: int, difference_sq: float, own_sq: float, now: float, sketch: Floats | None = None
    ) -> list[Effect]:  # fmt: skip
        """Handle the complete streams of an exchange: |theirs - ours|^2, |ours|^2, and a sketch of theirs - ours."""
        exchange = self.exchanges.table.get(session)
        effects = self.exchanges.route_report(Event.STREAMED, session, difference_sq, own_sq, now, sketch)
        if exchange is not None and effects:
            self.membership.on_proof_of_life(exchange.partner, now)
        return effects + self.follow_up(now) if self.needs_follow_up else effects

    def on_gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: Mapping[PeerId, str],
        absent: Iterable[PeerId], now: float,
    ) -> list[Effect]:  # fmt: skip
        """Handle a complete group average: |mean - ours|^2, |ours|^2, why members were refused, and those left out."""
        effects = self.exchanges.route_report(Event.GATHERED, session, difference_sq, own_sq, refused, absent, now)
        return effects + self.follow_up(now) if self.needs_follow_up else effects

    def on_failed(self, session: int, code: str, now: float) -> list[Effect]:
        """Handle the early end of a session's streams (an exchange, a piece fetched or served)."""
        effects = self.exchanges.route_report(Event.FAILED, session, code, now)
        effects += self.joining.on_failed(session, now)
        effects += self.donating.end(session)
        effects += self.moments.fail(session)
        return effects + self.follow_up(now)

    def on_moments(self, session: int, is_sound: bool, now: float) -> list[Effect]:
        """Handle a partner's moments, which have arrived whole. No honest member sends unsound ones."""
        partner = self.moments.member_of(session)
        if partner is not None and not is_sound:
            return [*self.moments.fail(session), *self.note_misbehaviour(partner, "refused", now)]
        return self.moments.on_moments(session)

    def on_served(self, session: int, now: float) -> list[Effect]:
        """Handle a piece that was streamed whole to a newcomer, or moments to a member."""
        return [*self.donating.end(session), *self.moments.on_served(session)]

    def on_proof_of_life(self, peer: PeerId, now: float) -> None:
        """Note progress of a stream with this member: a slow link may delay its answer to a probe."""
        self.membership.on_proof_of_life(peer, now)

    def note_misbehaviour(self, who: PeerId | str, kind: str, now: float) -> list[Effect]:
        """Count misbehaviour of a member or an address (:mod:`gossip.misbehaviour`)."""
        self.misbehaviour.note(who, kind, now)
        return [*self.misbehaviour.take()]

    # -- the weights of another run ------------------------------------------------------------------------------
    def on_collected(self, session: int, position: int, now: float) -> list[Effect]:
        """Handle elements of a fetched piece that have arrived, up to ``position``."""
        return self.joining.on_collected(session, position, now) + self.follow_up(now)

    def on_compared(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Handle a complete comparison: |theirs - ours|^2 and |ours|^2 over its elements."""
        return self.joining.on_compared(session, difference_sq, own_sq, now) + self.follow_up(now)

    def on_frozen_hashed(self, digest: bytes, now: float) -> list[Effect]:
        """Handle the hash of our frozen weights; empty if it could not be computed."""
        self.local.frozen_hash = digest
        return self.joining.on_frozen_hashed(now) + self.follow_up(now)

    def on_adopted(self, now: float, difference_sq: float = 0.0, own_sq: float = 0.0) -> list[Effect]:
        """Handle the adopted joining vector: its squared distance from the old weights, and their squared norm."""
        return self.own_run.on_adopted(now, difference_sq, own_sq)

    def on_not_kept(self, now: float) -> list[Effect]:
        """Handle a trial that could not start: the old weights could not be kept, and stay."""
        return self.own_run.on_not_kept(now)

    def on_restored(self, now: float) -> list[Effect]:
        """Handle the restored weights after a failed trial."""
        return self.own_run.on_restored(now)
