"""A visit of the training loop to its step boundary: what it applies to the model, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gossip.averaging.model import Pending, Upload
from gossip.averaging.vectors import Floats, Positions, Statistics, Vector


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an exchange: a difference to add, or a vector with a mass for :class:`gossip.effects.Merge`."""

    vector: Vector
    mass: float | None = None  # Push-sum mass of a vector to merge; None for a difference.
    # Elements of a vector to merge, at the positions of Movement, taken before the merge overwrites the vector.
    merge_sample: Floats | None = None
    positions: Positions | None = None  # Positions in the weights of a difference's elements; None for all.
    weight: float = 1.0  # Weight of a difference of all elements.
    statistics: Statistics | None = None  # A partner's statistics; the vector has zeros in their place.
    upload: Upload | None = None  # The values on their way to the model's device, if they go there ahead of the visit.


@dataclass(frozen=True, slots=True)
class Adoption:
    """Weights to adopt, and perhaps an optimizer's state behind them."""

    vector: Floats
    optimizer_keys: tuple[str, ...] = ()
    optimizer_scalars: tuple[tuple[str, float], ...] = ()
    trial: bool = False  # True: back up the present weights, which may be restored.
    frozen: bool = True  # False: the vector lacks the frozen weights, and those of the model stay.


@dataclass(slots=True)
class Visit:
    """The results of one visit of the training loop.

    Its vectors may be used once all ``copies`` are done, and widened where they are narrow.
    """

    updates: Sequence[Update] = ()  # Applied updates. Their vectors are back in the pool, except ``busy_vectors``.
    merged_shares: Sequence[float] = ()  # For each update, its vector's share in the weights; 0 for a difference.
    busy_vectors: list[Vector] = field(default_factory=list)  # Vectors that copies in progress read.
    snapshots: Sequence[tuple[int, Vector, float]] = ()  # Session, vector, and the push-sum mass that it carries.
    copies: Sequence[Pending] = ()  # Copies in progress.
    # The vector and the copy, for each copy into a vector: ``record_checks`` asks it whether all values are finite.
    finite_checks: Sequence[tuple[Vector, Pending]] = ()
    adopted: bool = False  # Other weights replaced the present ones.
    trial_distance: tuple[float, float] = (0.0, 0.0)  # Of an adoption on trial: |theirs - ours|^2 and |ours|^2.
    backup_failure: str = ""  # Reason why no weights were adopted on trial: no backup was possible.
    restored: bool = False  # The backup replaced weights on trial.
    # ``Boundary.decided_updates`` at the visit: the copies hold all updates until then, and none after.
    decided_updates: int = 0
    replacements: int = 0  # ``Boundary.replacements`` at the visit, which identifies the weights that were copied.
    spare_copy: Vector | None = None  # A copy for the exchange that is expected to begin now.
    newcomers_copy: Vector | None = None  # A copy for newcomers that come while the training loop stands.
    failed_sessions: Sequence[int] = ()  # Sessions whose snapshot found no memory on the model's device.
    lost_updates: int = 0  # Number of updates that found no memory there, and are not in the weights.

    @property
    def has_only_updates(self) -> bool:
        """Return True if the visit did nothing that the peer must be told."""
        copied = self.snapshots or self.spare_copy is not None or self.newcomers_copy is not None
        return not (copied or self.has_replaced or self.failed_sessions or self.lost_updates)

    @property
    def has_replaced(self) -> bool:
        """Return True if other weights replaced the present ones, or should have."""
        return self.adopted or self.restored or bool(self.backup_failure)

    def record_checks(self) -> None:
        """Record for each vector whether its copies, which are done, have found all values finite."""
        for vector, _ in self.finite_checks:
            results = [copy.finite for other, copy in self.finite_checks if other is vector]
            if vector.is_finite is None and None not in results:
                vector.is_finite = all(results)

    def unchecked_vectors(self, least_elements: int) -> list[Vector]:
        """Return the copies of at least so many elements that were not checked for finite values."""
        copied = [*(vector for _, vector, _ in self.snapshots), self.spare_copy, self.newcomers_copy]
        unique = {id(vector): vector for vector in copied if vector is not None}
        return [
            vector for vector in unique.values() if vector.is_finite is None and vector.array.size >= least_elements
        ]
