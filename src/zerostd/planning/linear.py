"""A linear program, row by row, solved by scipy's HiGHS. Knows variables and rows, never what they mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy
from scipy.optimize import linprog
from scipy.sparse import coo_array

__all__ = ["Infeasible", "Linear", "Outcome"]

MOST_SECONDS = 10.0  # for whole numbers; the best found by then is taken

Terms = Mapping[int, float]


class Infeasible(Exception):
    """No point satisfies all rows."""


@dataclass(frozen=True)
class Outcome:
    """A solution: values of all variables, what was minimised, and how much less it is for one more of a bound."""

    values: list[float]
    objective: float
    prices: dict[str, float]  # of named rows; >= 0

    def of(self, terms: Terms) -> float:
        """The value of a sum."""
        return sum(self.values[index] * factor for index, factor in terms.items())


class Linear:
    """A program under construction. Variables are numbers from `variable`, sums are dicts of factors."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float | None]] = []
        self._upper: list[tuple[Terms, float]] = []
        self._equal: list[tuple[Terms, float]] = []
        self._names: dict[str, int] = {}

    def variable(self, upper: float | None = None, lower: float = 0.0) -> int:
        """A new variable between two bounds."""
        self._bounds.append((lower, upper))
        return len(self._bounds) - 1

    def at_most(self, terms: Terms, bound: float, name: str | None = None) -> None:
        """sum <= bound. Of a named row the outcome knows the price."""
        if name is not None:
            self._names[name] = len(self._upper)
        self._upper.append((dict(terms), bound))

    def at_least(self, terms: Terms, bound: float) -> None:
        """sum >= bound."""
        self.at_most({index: -factor for index, factor in terms.items()}, -bound)

    def equals(self, terms: Terms, bound: float) -> None:
        """sum == bound."""
        self._equal.append((dict(terms), bound))

    def fix(self, index: int, value: float) -> None:
        """From now on a variable has this value."""
        self._bounds[index] = (value, value)

    def minimise(self, cost: Terms, whole: Collection[int] = ()) -> Outcome:
        """The best point, or Infeasible. Variables in `whole` take whole numbers, and then nothing has a price."""
        size = len(self._bounds)
        objective = numpy.zeros(size)
        for index, factor in cost.items():
            objective[index] += factor
        upper, upper_bounds = _matrix(self._upper, size)
        equal, equal_bounds = _matrix(self._equal, size)
        found = linprog(
            objective,
            upper,
            upper_bounds,
            equal,
            equal_bounds,
            bounds=self._bounds,
            method="highs",
            integrality=[int(index in whole) for index in range(size)] if whole else None,
            options={"time_limit": MOST_SECONDS} if whole else None,
        )
        if found.x is None:
            raise Infeasible(found.message)
        if whole:
            return Outcome([float(value) for value in found.x], float(found.fun), {})
        marginals = found.ineqlin.marginals
        prices = {name: max(0.0, -float(marginals[row])) for name, row in self._names.items()}
        return Outcome([float(value) for value in found.x], float(found.fun), prices)


def _matrix(rows: list[tuple[Terms, float]], size: int) -> tuple[coo_array | None, numpy.ndarray | None]:
    if not rows:
        return None, None
    places, columns, factors = [], [], []
    for place, (terms, _) in enumerate(rows):
        for column, factor in terms.items():
            places.append(place)
            columns.append(column)
            factors.append(factor)
    matrix = coo_array((factors, (places, columns)), shape=(len(rows), size)).tocsr()
    return matrix, numpy.array([bound for _, bound in rows])
