"""The per-parameter state of optimizers: what of it travels, and how it is read, written and moved."""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossip.errors import LayoutError
from node.model.device.copies import memory_errors
from node.model.inventory.examples import Example, can_be_told, is_scalar, is_state_of, listed, probe_state
from node.model.inventory.items import Item, foreign_sentence
from node.model.optimizers import Optimizers, with_inner
from node.model.scalars import HostCopy, largest
from node.model.tensors import LiveTensors, is_sharded, local_part

MAX_OPTIMIZER_KEYS = 4
"""The most tensors of a parameter's shape in an optimizer's state: amsgrad Adam and centred RMSprop keep 3."""

# State of torch's optimizers, and of others with the same names, that follows gradients and not weights. On a loss as
# |w|^2 / 2 the gradient equals the weight, so that values could not tell.
OF_GRADIENTS = frozenset({
    "acc_delta", "exp_avg", "exp_avg_diff", "exp_avg_sq", "exp_grad_norm", "exp_inf", "grad_avg", "max_exp_avg_sq",
    "moment1", "moment2", "momentum_buffer", "prev", "previous_grad", "quasi_global", "square_avg", "step_size", "sum",
})  # fmt: skip
# State in the coordinates of the weights: ASGD, schedule-free, Lookahead, masters of half-precision weights, averages.
OF_WEIGHTS = frozenset({
    "ax", "cached_params", "ema", "fp32_param", "lookahead_slow_buff", "master", "master_param", "master_weight",
    "old_p", "p0", "param_ema", "slow_buffer", "slow_param", "slow_params", "slow_weights", "x", "x0", "z",
})  # fmt: skip
# The square of the relative distance up to which state is a copy of the weights by its values. Momentum of any other
# scale than the weights' is at a distance of 1 or more.
NEAR_SQ = 0.1
Key = tuple[str, str]  # The name of an optimizer's class, and a key of its state.


class OptimizerState:
    """The state of the ``optimizers`` for a model's ``tensors``; empty without optimizers.

    A *trained* parameter is averaged, or requires a gradient, and is in an optimizer. Several optimizers may hold state
    of it, as one that wraps another.

    Raises:
        LayoutError: An optimizer holds parameters that the model lacks, and that the user has not named as local.
    """

    def __init__(self, tensors: LiveTensors, optimizers: Optimizers) -> None:
        self._tensors, self._optimizers = tensors, optimizers.holders
        # The names and the values of scalars on their way from the device.
        self._copy: tuple[list[str], HostCopy] | None = None
        self._arrived: dict[str, float] | None = None  # The scalars of the last copy that has arrived.
        self._elements: int | None = None  # The number of trained elements when the node started.
        self._follows: dict[Key, bool] = {}  # For each key of state: it is in the coordinates of the weights.
        self.told_keys: frozenset[Key] | None = None  # Those of which rank 0 says that they are, if it decides.
        # Without wrappers whose state cannot be told in advance, as SAM, which steps with a closure alone.
        self.givers = tuple(
            optimizer for optimizer in self._optimizers if len(with_inner(optimizer)) == 1 or can_be_told(optimizer)
        )
        self.check_foreign()

    def check_foreign(self) -> None:
        """Raise LayoutError if an optimizer trains parameters that are neither in the model nor local."""
        for optimizer in self._optimizers:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [parameter for parameter in held if id(parameter) not in self._tensors.known_ids]
            if foreign and len(foreign) == len(held):
                is_single = len(self._optimizers) == 1
                subject = "The optimizer" if is_single else f"One of the optimizers ({type(optimizer).__name__})"
                raise LayoutError(
                    f"{subject} holds none of this model's tensors: build it from the parameters of the model given."
                )
            if foreign:
                raise LayoutError(foreign_sentence(optimizer, foreign))

    # -- what there is -------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> tuple[str, ...]:
        """Return the sorted names of the state tensors that trained parameters have in their own shape.

        A parameter may lack some of them, as one that had no gradient yet, or one of another optimizer. There are none
        once the optimizers hold other parameters than at the start, since members agree on the length of the state.
        """
        if self.has_other_parameters:
            return ()
        named = [
            (key, value, parameter) for parameter, states in self.rows() for state in states
            for key, value in state.items() if isinstance(value, Tensor)
        ]  # fmt: skip
        # Scalars of a parameter that is a scalar too have its shape; those of the other parameters show what they are.
        scalars = {"step", *(key for key, value, parameter in named if parameter.dim() and not value.dim())}
        keys = {key for key, value, parameter in named if key not in scalars and is_state_of(value, parameter)}
        if len(keys) > MAX_OPTIMIZER_KEYS:
            raise LayoutError(
                f"The optimizers keep {len(keys)} tensors for each parameter and at most {MAX_OPTIMIZER_KEYS} are "
                "given to newcomers: they begin with the weights alone."
            )
        return tuple(sorted(keys))

    def begin(self) -> None:
        """Note the number of trained elements, on which the members agree."""
        self._elements = self.trained_elements

    @property
    def trained_elements(self) -> int:
        return sum(parameter.numel() for parameter in self.trained())

    @property
    def has_other_parameters(self) -> bool:
        """Return True if the optimizers train another number of elements than when the node started."""
        return self._elements is not None and self._elements != self.trained_elements

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the sorted names of state that newcomers cannot take: tensors of other shapes, and lists of them."""
        return tuple(sorted({
            str(key) for parameter, states in self.rows() for state in states for key, value in state.items()
            if not (key == "step" or is_state_of(value, parameter) or is_scalar(value) or value is None)
        }))  # fmt: skip

    def scalars(self) -> dict[str, float]:
        """Return the state's scalars, each as the largest value over the trained parameters. Waits for a device."""
        on_host, on_device = self.largest_scalars()
        return on_host | {key: float(value) for key, value in on_device.items()}

    def recent_scalars(self) -> dict[str, float] | None:
        """Return the scalars without waiting for a device: as of an earlier call, or None if none have arrived yet.

        One copy brings all of them from the device. Without a device they are the present ones.
        """
        on_host, on_device = self.largest_scalars()
        if not on_device:
            return on_host
        names, device = list(on_device), next(iter(on_device.values())).device
        if self._copy is None or self._copy[1].done():
            values = torch.stack([value.to(device) for value in on_device.values()])
            arrived, self._copy = self._copy, (names, HostCopy(values))
            if arrived is not None and arrived[0] == names:
                self._arrived = dict(zip(names, arrived[1].values.tolist(), strict=True))
        return None if self._arrived is None else {**on_host, **self._arrived}

    def largest_scalars(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return each scalar's largest value: those on the host as numbers, and those on a device."""
        keys = self.keys
        on_host: dict[str, float] = {}
        on_device: dict[str, list[Tensor]] = {}
        for _, states in self.rows() if keys else ():
            for key, value in (item for state in states for item in state.items()):
                if key in keys or not is_scalar(value):
                    continue
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.setdefault(key, []).append(value)
                else:
                    on_host[key] = max(float(value), on_host.get(key, -math.inf))
        return on_host, {key: largest(values) for key, values in on_device.items()}

    def holders(self) -> dict[int, list[tuple[torch.optim.Optimizer, dict[str, Any]]]]:
        """Return the optimizers of each parameter with its group, by its id. A program may add groups at any time."""
        held: dict[int, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    held.setdefault(id(parameter), []).append((optimizer, group))
        return held

    def kinds(self, tensors: Sequence[Tensor]) -> list[Hashable]:
        """Return for each tensor its type and its optimizer: those alike are treated alike by an optimizer."""
        holders = self.holders()
        return [(tensor.dtype, *(id(optimizer) for optimizer, _ in holders.get(id(tensor), ()))) for tensor in tensors]

    def trained(self) -> list[Tensor]:
        """Return the trained parameters in the layout's order."""
        if not self._optimizers:
            return []
        holders, segments = self.holders(), self._tensors.layout.segments
        # An averaged parameter counts whether or not it requires a gradient now, which a GAN's loop switches.
        return [
            tensor for segment, tensor in zip(segments, self._tensors.current(), strict=False)
            if id(tensor) in holders and (segment.kind == "parameter" or tensor.requires_grad)
        ]  # fmt: skip

    def holders_of_trained(self) -> list[tuple[Tensor, list[torch.optim.Optimizer]]]:
        """Return each trained parameter with the optimizers whose state of it can be given."""
        holders = self.holders()
        return [
            (parameter, [optimizer for optimizer, _ in holders[id(parameter)] if optimizer in self.givers])
            for parameter in self.trained()
        ]

    def rows(self) -> Iterator[tuple[Tensor, list[Mapping[str, Any]]]]:
        """Yield each trained parameter with its states, one of each optimizer that has any."""
        for parameter, optimizers in self.holders_of_trained():
            states = (optimizer.state.get(parameter) for optimizer in optimizers)
            yield parameter, [state for state in states if state]

    def tensors(self, keys: Sequence[str]) -> list[Tensor]:
        """Return the state tensors of all trained parameters, key by key, in the vector's order.

        Where a parameter has none, the result has zeros, which take no memory of their own.
        """
        rows = list(self.rows()) if keys else []
        return [state_tensor(parameter, states, key) for key in keys for parameter, states in rows]

    def items(self, mixed: Callable[[list[str]], Collection[str]] = lambda keys: ()) -> list[Item]:
        """Return the state by optimizer and key, each with its treatment and the reason.

        ``mixed`` returns those of some keys whose moments are mixed.
        """
        found: dict[Key, Item] = {}
        for optimizer in self._optimizers:
            kind, keys = type(optimizer).__name__, [str(key) for key in self.examples_of(optimizer)]
            for key in keys:
                name = f"{kind}.{key}"
                if self._follows.get((kind, key), key in OF_WEIGHTS):
                    found[kind, key] = Item(name, (), "state", "follow", "moves as its weight does")
                elif key in mixed(keys):
                    found[kind, key] = Item(name, (), "state", "mix", "scales or directs steps of one length")
                else:
                    found[kind, key] = Item(name, (), "state", "give", "of gradients, steps or scales")
        return list(found.values())

    def examples_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the keys of an optimizer's state, of a probe's if it has none yet; empty if none can be told."""
        for state in optimizer.state.values():
            if isinstance(state, Mapping) and state:
                return list(state)
        try:
            return list(probe_state(optimizer, optimizer.param_groups[0])[1])
        except Exception:  # A user's optimizer may raise anything.
            return []

    def is_follower(self, key: str) -> bool:
        """Return True if any optimizer's state under this key is in the coordinates of the weights."""
        return any(
            self.follows(optimizer, key) for optimizer in self._optimizers
            if any(isinstance(state, Mapping) and key in state for state in optimizer.state.values())
        )  # fmt: skip

    # -- what follows the weights ----------------------------------------------------------------------------------
    def followed_keys(self) -> tuple[Key, ...]:
        """Return the keys of state that follows the weights. Every mix asks, so names decide where they can."""
        # Parameters differ in their state: only those of half precision may have masters.
        return tuple(
            (type(optimizer).__name__, str(key))
            for optimizer in self._optimizers
            for key in set().union(*(state for state in optimizer.state.values() if isinstance(state, Mapping)))
            if self.follows(optimizer, key)
        )

    def followers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the state in the coordinates of the weights: each parameter with its state tensor."""
        holders = self.holders()
        pairs = [
            (parameter, value)
            for parameter in self.trained() for optimizer, _ in holders[id(parameter)]
            for key, value in (optimizer.state.get(parameter) or {}).items()
            if self.follows(optimizer, key) and lies_alike(value, parameter)
        ]  # fmt: skip
        # After SAM's second step a parameter is its own state: the weight has moved already.
        return [(one, value) for one, value in pairs if local_part(one).data_ptr() != local_part(value).data_ptr()]

    def follows(self, optimizer: torch.optim.Optimizer, key: object) -> bool:
        """Return True if this key of an optimizer's state is in the coordinates of the weights; decided once.

        Known names decide, else the values over all parameters: state that nearly equals the weights follows them.
        """
        name = (type(optimizer).__name__, str(key))
        if self.told_keys is not None:
            return name in self.told_keys
        if name not in self._follows:
            if key in OF_GRADIENTS or key in OF_WEIGHTS:
                self._follows[name] = key in OF_WEIGHTS
            elif (is_near := self.is_near_weights(optimizer, key)) is not None:
                self._follows[name] = is_near
        return self._follows.get(name, False)

    @torch.no_grad()
    def is_near_weights(self, optimizer: torch.optim.Optimizer, key: object) -> bool | None:
        """Return True if all state under this key is near the weights; None if those are all zero, or not finite."""
        apart_sq = own_sq = 0.0
        has_state = False
        for parameter, state in optimizer.state.items():
            value = state.get(key) if isinstance(state, Mapping) else None
            if not (isinstance(parameter, Tensor) and isinstance(value, Tensor) and parameter.dim()):
                continue  # A scalar's step counts and products have its shape.
            if lies_alike(value, parameter):
                has_state = True
                weights, values = local_part(parameter).float(), local_part(value).float()
                apart_sq += float((values - weights).square().sum())
                own_sq += float(weights.square().sum())
        return has_state and (apart_sq <= NEAR_SQ * own_sq if 0.0 < own_sq < math.inf else None)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move the state that follows the weights by as much as the weights move inside the block.

        Raises:
            MemoryError: The device has no memory for a copy of these weights, before the block. No more is taken.
        """
        pairs = self.followers() if self.followed_keys() else []
        with torch.no_grad():
            with memory_errors():
                before = [
                    parameter.detach().to(torch.promote_types(parameter.dtype, state.dtype), copy=True)
                    for parameter, state in pairs
                ]
            yield
            for (parameter, state), old in zip(pairs, before, strict=True):
                state.sub_(old.sub_(parameter))

    # -- what newcomers take -----------------------------------------------------------------------------------------
    def examples(self, keys: Sequence[str], scalars: Mapping[str, float]) -> dict[int, list[Example]]:
        """Return examples of the optimizers' state for each trained parameter, by the parameter's id.

        A fresh optimizer has no state yet. So a copy of it takes one step on a small parameter, with the options of
        each group.

        Args:
            keys: The names of the tensors that the examples together should have.
            scalars: The scalars that they should have, by name.

        Raises:
            LayoutError: The examples have other names, or a name or scalar is invalid.
        """
        if len(keys) > MAX_OPTIMIZER_KEYS or len(scalars) > MAX_OPTIMIZER_KEYS or len(set(keys)) < len(keys):
            raise LayoutError(f"Optimizer state is at most {MAX_OPTIMIZER_KEYS} different keys, and as many scalars.")
        if not all(isinstance(key, str) and key.isidentifier() for key in (*keys, *scalars)):
            raise LayoutError("A key of optimizer state is not a name.")
        if not all(isinstance(scalar, float) and 0.0 <= scalar < math.inf for scalar in scalars.values()):
            raise LayoutError("A scalar of optimizer state is negative or not finite.")
        if not (keys or scalars):
            return {}
        if not self._optimizers:
            raise LayoutError("There is no optimizer to write state into: give Node the optimizer, or weights alone.")
        trained = {id(parameter) for parameter in self.trained()}
        examples: dict[int, list[Example]] = {}
        kept_keys: set[str] = set()
        kept_scalars: set[str] = set()
        for optimizer in self.givers:
            for group in optimizer.param_groups:
                ids = trained.intersection(map(id, group["params"]))
                if not ids:
                    continue
                example = Example.of(optimizer, group)
                kept_keys |= example.keys
                kept_scalars |= example.scalars
                for each in ids:
                    examples.setdefault(each, []).append(example)
        if (kept_keys, kept_scalars) != (set(keys), set(scalars)):
            names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self._optimizers))
            raise LayoutError(
                f"{names} keeps {listed([*kept_keys, *kept_scalars])} for each parameter and was given "
                f"{listed([*keys, *scalars])}: use the swarm's optimizer, or take the weights alone."
            )
        return examples

    def create(self, keys: Sequence[str], examples: Mapping[int, Sequence[Example]]) -> list[Tensor | None]:
        """Return the same as :meth:`tensors`, after creating missing tensors as zeros.

        The result has None where the optimizers of a parameter keep no such state.
        """
        tensors: list[Tensor | None] = []
        for key in keys:
            for parameter in self.trained():
                example = next((each for each in examples[id(parameter)] if key in each.keys), None)
                if example is None:
                    tensors.append(None)
                    continue
                state = example.optimizer.state.setdefault(parameter, {})
                if not is_state_of(state.get(key), parameter):
                    state[key] = torch.zeros_like(parameter, dtype=example.state[key].dtype)
                tensors.append(state[key])
        return tensors

    def set_scalars(self, scalars: Mapping[str, float], examples: Mapping[int, Sequence[Example]]) -> None:
        """Set these scalars for every trained parameter whose optimizers keep them."""
        for parameter in self.trained() if scalars else ():
            for example in examples[id(parameter)]:
                state = example.optimizer.state.setdefault(parameter, {})
                for key in example.scalars.intersection(scalars):
                    scalar, shown = scalars[key], example.state[key]
                    if isinstance(state.get(key), Tensor):
                        state[key].fill_(scalar)
                    elif isinstance(shown, Tensor):
                        # Scalars of a fused or captured optimizer are on the parameter's device, others on the host.
                        device = parameter.device if shown.is_cuda else shown.device
                        state[key] = torch.full_like(shown, scalar, device=device)
                    else:
                        state[key] = type(shown)(scalar)

    @torch.no_grad()
    def drop_unused(self, keys: Sequence[str]) -> None:
        """Drop the state of parameters whose tensors are all zero: they had no gradient yet at the donor.

        With the step count of the others, an optimizer would correct their first moments as if they had many steps.
        """
        for parameter, states in list(self.rows()):
            values = [value for state in states for key, value in state.items() if key in keys]
            if values and not any(bool(value.any()) for value in values if is_state_of(value, parameter)):
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def clear_non_finite(self) -> None:
        """Clear the whole state of each parameter that has a non-finite tensor in it.

        An optimizer only recreates a state that is missing altogether.
        """
        for _, states in self.rows():
            for state in states:
                tensors = [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
                if not all(bool(torch.isfinite(local_part(tensor)).all()) for tensor in tensors):
                    state.clear()  # type: ignore[attr-defined]


def state_tensor(parameter: Tensor, states: Sequence[Mapping[str, Any]], key: str) -> Tensor:
    """Return a parameter's state under this key; zeros of its shape if there is none."""
    for state in states:
        if is_state_of(state.get(key), parameter):
            tensor: Tensor = state[key]
            return tensor
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def lies_alike(value: object, parameter: Tensor) -> bool:
    """Return True for state of a parameter's shape, of which this process holds the same part."""
    return is_state_of(value, parameter) and is_sharded(value) == is_sharded(parameter)
