"""The training thread's checks of its model, which tell the user in one sentence that a program defeats mixing."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gossip.errors import LayoutError
from node.model.scalars import HostCopy, beside
from node.model.snapshot import TorchState
from node.model.state import State
from node.model.tensors import local_part

SAMPLED_ELEMENTS = 16  # Of each tensor, by which a change is found that the program makes to the whole.
KEPT_ELEMENTS = 4_096  # The same of each that has no mean: a mask may change in a few places.
UNCHANGED_STEPS = 32  # Steps with a loss or samples that change no weight. The first ones of a warm-up may change none.
# The relative difference between the lengths of rows that are of one length, and of rows that are not any more.
SAME_LENGTH, OTHER_LENGTH = 1e-4, 1e-2


class ModelWatch:
    """The watch over one model. It does nothing for a model that is no torch module or mapping.

    Args:
        state: The model.
        notify: Tells the user, with a kind of notice and a sentence.
        on_changed: Called when a frozen tensor has changed, so that its hash is renewed.
    """

    def __init__(self, state: State, notify: Callable[[str, str], None], on_changed: Callable[[], None]) -> None:
        self.state = state if isinstance(state, TorchState) else None
        self.notify, self.on_changed = notify, on_changed
        self.is_mapping = self.state is not None and isinstance(self.state.live_tensors.model, Mapping)
        self.averaged_elements = KEPT_ELEMENTS if self.is_mapping else SAMPLED_ELEMENTS
        self.told: set[str] = set()  # Sentences that the user has seen.
        self.frozen_sample: list[Tensor] | None = None  # The sampled elements of each frozen tensor, at the last look.
        # The sampled elements of each averaged tensor as the last call of `step` left them; None once a step has
        # changed any.
        self.averaged_sample: list[Tensor] | None = None
        self.unchanged_steps = 0
        self.is_training = False  # The last step had a loss or samples.
        self.change: HostCopy | None = None  # Which ones a step has changed, on its way from the device.
        self.changed: Tensor | None = None  # Which ones any step has changed.
        self.normalised: list[str] = []  # Averaged buffers whose rows or columns were of one length at the begin.
        self.kept_sample: list[Tensor] | None = None  # The same of what has no mean, as the run began here.

    def begin(self) -> None:
        """Say what travels how, before the first step."""
        if self.state is not None:
            self.notify("inventory", self.state.inventory().counts())
            self.averaged_sample = []
            self.state.optimizer_state.begin()
            buffers = self.state.live_tensors.named("buffer")
            self.normalised = [name for name, tensor in buffers if has_directions(tensor)]
            self.look_at_kept(self.state.live_tensors.kept())

    def on_step(self, is_training: bool) -> None:
        """Look whether this step has changed the weights, and whether it has undone a mix. Every step calls it."""
        state, self.is_training = self.state, is_training
        if self.averaged_sample and state is not None and is_training:
            self.look_at_changes(self.sample_averaged(state), self.averaged_sample)
        if state is not None and state.probe.is_waiting and state.probe.on_step():
            names = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in state.optimizers.all))
            self.notify_once(
                f"What a mix changes is gone one step later, so that the nodes train apart: {names or 'no optimizer'}, "
                "or the program, keeps a copy of the weights where this node does not see it. Keep it in "
                "optimizer.state, or write the weights into it before each step.",
                "undone",
            )

    def sample_averaged(self, state: TorchState) -> list[Tensor]:
        """Return samples of the averaged tensors, of a mapping the small ones whole."""
        return [sampled(tensor, self.averaged_elements) for tensor in state.exchanged_tensors()]

    def look_at_changes(self, now: list[Tensor], last: list[Tensor]) -> None:
        """Notice that steps change no weight, without waiting for a device: its word comes at a later step.

        A program may rebind a tensor of a mapping (``mean = 0.9 * mean + ...``), so there each is watched by itself.
        """
        if self.change is None:
            differ = [(new != old).any() for new, old in zip(now, beside(last, now), strict=True)]
            self.change = HostCopy(torch.stack([changed.to(differ[0].device) for changed in differ]))
        if not self.change.done():
            return
        changed, self.change = self.change.values, None
        self.changed = changed if self.changed is None else self.changed | changed
        if self.changed.any() and (not self.is_mapping or self.changed.all()):
            self.averaged_sample = None
            return
        self.unchanged_steps += 1
        if self.unchanged_steps == UNCHANGED_STEPS:
            if self.changed.any():
                self.tell_of_rebound(self.changed.tolist())
                return
            self.notify_once(
                f"No weight of this Node has changed in {UNCHANGED_STEPS} steps, so that nothing trained is mixed: "
                "does the loop train a copy of the model, or other tensors than those given to Node? Make the Node "
                "from the model and the optimizer that the loop trains.",
                "unchanged",
            )

    def tell_of_rebound(self, changed: list[bool]) -> None:
        """Tell of statistics of a mapping that stay as they began while others change.

        These are small tensors of one value, as zeros, without a gradient. Others that stay may be frozen or constants.
        """
        assert self.state is not None
        named = self.state.live_tensors.named("parameter", "buffer")
        if names := [
            name for (name, tensor), has_changed in zip(named, changed, strict=True)
            if not has_changed and not tensor.requires_grad and 1 < tensor.numel() <= KEPT_ELEMENTS
            and len(set(sampled(tensor, KEPT_ELEMENTS).tolist())) == 1
        ]:  # fmt: skip
            self.notify_once(
                f"Tensor {and_more(names)} of the mapping has not changed in {UNCHANGED_STEPS} steps, while others "
                "have: if the program computes it anew, write into it (tensor.copy_(...)), since the Node mixes and "
                "saves the tensor that it was given. A constant may be named in copy=.",
                "unchanged",
            )

    def on_stepped(self) -> None:
        """Handle the end of a call of ``step``, which may have mixed. Without a loss and samples it costs nothing."""
        is_watched = self.averaged_sample is not None and self.unchanged_steps < UNCHANGED_STEPS
        if self.is_training and is_watched and self.state is not None:
            self.averaged_sample = self.sample_averaged(self.state)

    def on_adopted(self) -> None:
        """Say why a newcomer's weights came without the optimizer's state, if they did."""
        if self.state is not None and self.state.state_refusal:
            self.notify_once(f"The optimizer's state begins afresh here: {self.state.state_refusal}", "optimizer")
        self.frozen_sample = self.kept_sample = None
        if self.state is not None:
            self.look_at_kept(self.state.live_tensors.kept())

    def look(self) -> None:
        """Look at the optimizers and the frozen tensors, some seconds apart.

        Raises:
            LayoutError: An optimizer got parameters that the model lacks.
        """
        if self.state is None:
            return
        optimizer_state = self.state.optimizer_state
        optimizer_state.check_foreign()
        try:
            _ = optimizer_state.keys
        except LayoutError as error:
            self.notify_once(str(error), "optimizer")
        if left_out := optimizer_state.left_out:
            self.notify_once(
                f"Of the optimizer's state newcomers cannot take {', '.join(left_out)}, which have other shapes than "
                "the weights: they take the weights alone, and their state begins afresh.",
                "optimizer",
            )
        if optimizer_state.has_other_parameters:
            self.notify_once(
                "The optimizers hold other parameters than when the Node was made, so that newcomers cannot take their "
                "state and begin it afresh: give the optimizers all parameters before the Node is made.",
                "optimizer",
            )
        if new := self.state.live_tensors.unshared():
            self.notify_once(
                f"Tensor {new[0]!r} is held by its module outside of its state, or was added while this node trains, "
                "and is neither mixed nor given to newcomers: make it a parameter or a buffer of its shape (a list of "
                "modules an nn.ModuleList) before the Node is made, or name it in local=.",
                "buffer",
            )
        self.look_at_buffers(self.state.live_tensors.named("buffer"))
        self.look_at_frozen(self.state)
        self.look_at_kept(self.state.live_tensors.kept())

    def look_at_buffers(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Notice averaged buffers of normalised rows that mixes have made shorter: a queue, codes, random features."""
        for name, tensor in named if self.normalised else ():
            if name in self.normalised and not has_directions(tensor, OTHER_LENGTH):
                self.notify_once(
                    f"The rows or columns of buffer {name!r} were of one length and are not any more, since the mean "
                    "of two directions is shorter (a queue, a codebook, random features?): name it in copy= or local=, "
                    "or normalise it where it is used.",
                    "directions",
                )

    def look_at_frozen(self, state: TorchState) -> None:
        """Notice frozen tensors that the program changes, as the teacher of BYOL or a momentum encoder."""
        named = state.live_tensors.named("frozen")
        last, self.frozen_sample = self.frozen_sample, [sampled(tensor).cpu() for _, tensor in named]
        if changed := changed_names(named, last, self.frozen_sample):
            self.on_changed()
            self.notify_once(
                f"Tensor {and_more(changed)} requires no gradient and changes while this node trains (a teacher?): it "
                f"is not mixed, and newcomers take it {state.donated}. To mix it, give Node average=[{changed[0]!r}].",
                "teacher",
            )

    def look_at_kept(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Notice ranges that each node observes for itself, masks that it draws, and memories that it fills."""
        now = [sampled(tensor, KEPT_ELEMENTS).cpu().view(torch.uint8) for _, tensor in named]
        if self.kept_sample is None:
            self.kept_sample = now
        if changed := changed_names(named, self.kept_sample, now):
            self.notify_once(
                f"Tensor {and_more(changed)} has no mean (whole numbers, a mask, the range of a quantiser, or one that "
                "began as infinite) and changes while this node trains: each node keeps its own, so that they evaluate "
                "differently even once settled. Let all make the same change then, or take the checkpoint of one node.",
                "ranges",
            )

    def notify_once(self, sentence: str, kind: str) -> None:
        """Tell the user once of each kind."""
        if kind not in self.told:
            self.told.add(kind)
            self.notify(kind, sentence)


@torch.no_grad()
def has_directions(tensor: Tensor, tolerance: float = SAME_LENGTH) -> bool:
    """Return True if the rows or the columns of a tensor are of one length, in different directions."""
    tensor = local_part(tensor).detach()
    if tensor.dim() < 2 or min(tensor.shape) < 2:
        return False
    rows = tensor.float().flatten(1)
    if bool((rows == 0).any()):  # An identity, or zeros: a covariance begins so, and may become anything.
        return False
    return any(
        bool(lengths.amax() - lengths.amin() <= tolerance * lengths.amax()) and bool(rows.std() > 0)
        for lengths in (rows.norm(dim=1), rows.norm(dim=0))
    )


def changed_names(named: Sequence[tuple[str, Tensor]], last: list[Tensor] | None, now: list[Tensor]) -> list[str]:
    """Return the names of the tensors whose samples differ; none at the first look."""
    pairs = zip(named, last or now, now, strict=True)
    return [name for (name, _), a, b in pairs if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]


def and_more(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@torch.no_grad()
def sampled(tensor: Tensor, elements: int = SAMPLED_ELEMENTS) -> Tensor:
    """Return a copy of some elements, evenly spaced; of a sharded tensor those of this process."""
    flat = local_part(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // elements)].clone()
