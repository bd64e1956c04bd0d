"""Random durations: one class for step times, session lengths and latencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from sim.arrays import F64
from sim.scenario.tables import KeyFault, require

# The parameters of each kind in order. The ones in SECONDS are times, whose keys may have a unit (scale_s, median_ms);
# the default unit is seconds.
PARAMETERS = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma"),
    "exponential": ("mean",),
    "weibull": ("shape", "scale"),
}
SECONDS = frozenset({"value", "low", "high", "median", "mean", "scale"})


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of seconds, which are never negative.

    Create one by a classmethod, or from a table like ``{ kind = "weibull", shape = 0.59, scale_s = 6408 }``; a plain
    number is a constant. Weibull: P(X > x) = exp(-(x / scale)**shape). Log-normal: median exp(sigma Z), Z standard
    normal.

    Attributes:
        kind: A key of PARAMETERS.
        parameters: In the order of PARAMETERS, times in seconds.

    Raises:
        ConfigError: No distribution of durations has these parameters.
    """

    kind: str
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        names = PARAMETERS.get(self.kind)
        require(names is not None, "kind", self.kind, "one of " + ", ".join(PARAMETERS))
        assert names is not None
        assert len(names) == len(self.parameters), f"{self.kind} takes {names}"
        zero_allowed = {"value", "low", "sigma"}
        for name, value in zip(names, self.parameters, strict=True):
            if name in zero_allowed:
                require(0 <= value < math.inf, name, value, "a number from 0 up")
            else:
                require(0 < value < math.inf, name, value, "a positive number")
        if self.kind == "uniform":
            require(self.parameters[0] <= self.parameters[1], "high", self.parameters[1], "at least low")
        try:
            is_endless = not math.isfinite(self.mean)
        except OverflowError:
            is_endless = True
        index = names.index("sigma" if "sigma" in names else names[0])  # The parameter that makes the mean endless.
        require(not is_endless, names[index], self.parameters[index], "nearer to 1: the mean would be endless")

    @classmethod
    def constant(cls, value_s: float) -> Distribution:
        """Return a constant of this many seconds."""
        return cls("constant", (float(value_s),))

    @classmethod
    def uniform(cls, low_s: float, high_s: float) -> Distribution:
        """Return a uniform distribution from low to high."""
        return cls("uniform", (float(low_s), float(high_s)))

    @classmethod
    def lognormal(cls, median_s: float, sigma: float) -> Distribution:
        """Return a log-normal distribution: one in six draws is above median * exp(sigma)."""
        return cls("lognormal", (float(median_s), float(sigma)))

    @classmethod
    def exponential(cls, mean_s: float) -> Distribution:
        """Return an exponential distribution, which has no memory."""
        return cls("exponential", (float(mean_s),))

    @classmethod
    def weibull(cls, shape: float, scale_s: float) -> Distribution:
        """Return a Weibull distribution. Below shape 1 long durations tend to go on, as on spot machines."""
        return cls("weibull", (float(shape), float(scale_s)))

    # -- tables ------------------------------------------------------------------------------------------------------
    @classmethod
    def parse(cls, value: object) -> Distribution:
        """Parse a scenario's value; errors name the key."""
        if isinstance(value, Distribution):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            require(0 <= value < math.inf, "", value, "a number from 0 up, or a table of kind and parameters")
            return cls.constant(value)
        require(isinstance(value, Mapping), "", value, "a number, or a table of kind and parameters")
        assert isinstance(value, Mapping)
        table: dict[str, Any] = dict(value)
        kind = table.pop("kind", None)
        require(isinstance(kind, str) and kind in PARAMETERS, "kind", kind, "one of " + ", ".join(PARAMETERS))
        parameters = [take_parameter(table, name, str(kind)) for name in PARAMETERS[str(kind)]]
        for name in table:
            raise KeyFault(name, f"is no parameter of {kind}: it has {', '.join(PARAMETERS[str(kind)])}.")
        return cls(str(kind), tuple(parameters))

    def plain(self) -> dict[str, Any]:
        """Return the table that :meth:`parse` reads."""
        names = [name + "_s" if name in SECONDS else name for name in PARAMETERS[self.kind]]
        return {"kind": self.kind} | dict(zip(names, self.parameters, strict=True))

    def __str__(self) -> str:
        words = [
            f"{name} {value:g}" + (" s" if name in SECONDS else "")
            for name, value in zip(PARAMETERS[self.kind], self.parameters, strict=True)
        ]
        return words[0].removeprefix("value ") if self.kind == "constant" else f"{self.kind}, {', '.join(words)}"

    # -- numbers -----------------------------------------------------------------------------------------------------
    @property
    def two_parameters(self) -> tuple[float, float]:
        """Return the parameters, with 0 in place of a second one if the kind has only one."""
        return self.parameters[0], self.parameters[1] if len(self.parameters) > 1 else 0.0

    @property
    def mean(self) -> float:
        """Return the mean in seconds."""
        first, second = self.two_parameters
        if self.kind == "uniform":
            return (first + second) / 2
        if self.kind == "lognormal":
            return first * math.exp(second**2 / 2)
        return second * math.gamma(1 + 1 / first) if self.kind == "weibull" else first

    def draw(self, rng: np.random.Generator, count: int) -> F64:
        """Return ``count`` independent draws, in seconds."""
        first, second = self.two_parameters
        if self.kind == "constant":
            return np.full(count, first)
        if self.kind == "uniform":
            return rng.uniform(first, second, count)
        if self.kind == "lognormal":
            return first * np.exp(second * rng.standard_normal(count))
        if self.kind == "exponential":
            return rng.exponential(first, count)
        return second * rng.weibull(first, count)

    def residual(self, rng: np.random.Generator) -> float:
        """Draw the rest, in seconds, of a duration that is in progress at a random time.

        A random time hits a long duration more often than a short one (the inspection paradox; D. R. Cox, Renewal
        Theory, 1962, section 5.4). The whole duration around it has the density x f(x) / mean, which is drawn in
        closed form for each kind, and a uniform share of it is left.
        """
        first, second = self.two_parameters
        if self.kind == "constant":
            duration = first
        elif self.kind == "uniform":
            duration = math.sqrt(first**2 + rng.random() * (second**2 - first**2))
        elif self.kind == "lognormal":
            duration = first * math.exp(second**2 + second * rng.standard_normal())
        elif self.kind == "exponential":
            duration = rng.gamma(2.0, first)
        else:  # (x / scale)**shape is exponential, so weighted by x it is Gamma(1 + 1 / shape).
            duration = second * rng.gamma(1 + 1 / first) ** (1 / first)
        return float(rng.random() * duration)

    def quantiles(self, shares: F64) -> F64:
        """Return the quantiles, in seconds, at these shares (each within 0..1, both ends excluded)."""
        first, second = self.two_parameters
        if self.kind == "constant":
            return np.full(shares.shape, first)
        if self.kind == "uniform":
            return first + shares * (second - first)
        if self.kind == "lognormal":
            normal = NormalDist()
            return first * np.exp(second * np.array([normal.inv_cdf(share) for share in shares.tolist()]))
        if self.kind == "exponential":
            return -first * np.log1p(-shares)
        return second * (-np.log1p(-shares)) ** (1 / first)


def take_parameter(table: dict[str, Any], name: str, kind: str) -> float:
    """Remove one parameter from the table and return it, in seconds if it is a time."""
    # The keys under which it may be given, with the factor to its unit here.
    factors = {name: 1.0, f"{name}_s": 1.0, f"{name}_ms": 1e-3} if name in SECONDS else {name: 1.0}
    given_keys = [key for key in factors if key in table]
    if len(given_keys) != 1:
        wanted = f"{name}_s" if name in SECONDS else name
        raise KeyFault(wanted, f"must be given once: {kind} has {', '.join(PARAMETERS[kind])}.")
    (key,) = given_keys
    value = table.pop(key)
    require(isinstance(value, int | float) and not isinstance(value, bool), key, value, "a number")
    return float(value) * factors[key]
