"""A node's current figures, for programs, as a mapping."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from node.observe.figures import MEASURED, Source, none_if_nan


class Metrics(Mapping[str, Any]):
    """An immutable reading: every scalar figure by its name, which is an attribute too. None where unknown."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    @classmethod
    def of(cls, source: Source) -> Self:
        return cls({figure.name: none_if_nan(figure.read(source)) for figure in MEASURED if figure.read is not None})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name in Metrics.__slots__ or name not in self._values:
            raise AttributeError(f"There is no figure {name!r}: {', '.join(figure.name for figure in MEASURED)}.")
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("A reading does not change: ask node.metrics() for another.")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (self._values,)
