"""A linear program, solved by scipy's HiGHS. Knows variables and rows, never what they mean.

Rows come one by one, as sums over numbered variables, or many at once: then each term is an array of variables, one for
each row, with their factors. The matrix is a list of such arrays, so a program of thousands of rows is made in no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Array", "Infeasible", "LinearProgram", "LinearSolution", "Term"]

MOST_SECONDS = 1.5  # for whole numbers; the best found by then is taken
CLOSE = 1e-3  # how far whole numbers may be from the best

Array = numpy.ndarray[Any, Any]
Terms = Mapping[int, float]
Term = tuple[Array, Array | float]  # variables, one for each row, and their factors


class Infeasible(Exception):
    """No point satisfies all rows."""


@dataclass(frozen=True)
class LinearSolution:
    """A solution: values of all variables, what was minimised, and how much less it is for one more of a bound."""

    values: Array
    objective: float
    prices: dict[str, float]  # of named rows; >= 0

    def of(self, terms: Terms) -> float:
        """The value of a sum."""
        return float(sum(self.values[index] * factor for index, factor in terms.items()))


class _Constraints:
    """Rows of one kind, as three arrays: row, column, factor."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Array, Array, Array]] = []
        self._bounds: list[Array] = []

    def add(self, terms: Sequence[Term], bound: Array | float, count: int) -> None:
        places = numpy.arange(self.count, self.count + count)
        for columns, factors in terms:
            self._parts.append((places, columns, numpy.broadcast_to(factors, columns.shape)))
        self._bounds.append(numpy.broadcast_to(numpy.asarray(bound, float), (count,)))
        self.count += count

    def add_one(self, terms: Terms, bound: float) -> None:
        columns = numpy.fromiter(terms.keys(), int, len(terms))
        factors = numpy.fromiter(terms.values(), float, len(terms))
        self._parts.append((numpy.full(len(terms), self.count), columns, factors))
        self._bounds.append(numpy.array([bound]))
        self.count += 1

    def matrix(self, size: int) -> tuple[csr_array | None, Array | None]:
        from scipy.sparse import csr_array  # see `minimise`

        if not self.count:
            return None, None
        places, columns, factors = (numpy.concatenate(part) for part in zip(*self._parts, strict=True))
        return csr_array((factors, (places, columns)), shape=(self.count, size)), numpy.concatenate(self._bounds)


class LinearProgram:
    """A program under construction. Variables are numbers from `variable`, or arrays of them from `variables`."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._most, self._equal = _Constraints(), _Constraints()
        self._names: dict[str, int] = {}

    def variable(self, upper: float | None = None, lower: float = 0.0) -> int:
        """A new variable between two bounds."""
        self._lower.append(lower)
        self._upper.append(numpy.inf if upper is None else upper)
        return len(self._lower) - 1

    def variables(self, count: int, upper: Array | float = numpy.inf) -> Array:
        """As many new ones, from 0 up to their bounds."""
        first = len(self._lower)
        self._lower += [0.0] * count
        self._upper += [float(one) for one in numpy.broadcast_to(upper, (count,))]
        return numpy.arange(first, first + count)

    def at_most(self, terms: Terms, bound: float, name: str | None = None) -> None:
        """sum <= bound. Of a named row the outcome knows the price."""
        if name is not None:
            self._names[name] = self._most.count
        self._most.add_one(terms, bound)

    def at_least(self, terms: Terms, bound: float) -> None:
        """sum >= bound."""
        self.at_most({index: -factor for index, factor in terms.items()}, -bound)

    def equals(self, terms: Terms, bound: float) -> None:
        """sum == bound."""
        self._equal.add_one(terms, bound)

    def each_at_most(self, terms: Sequence[Term], bound: Array | float) -> None:
        """As many rows as the arrays are long, each sum <= its bound."""
        self._most.add(terms, bound, len(terms[0][0]))

    def each_equals(self, terms: Sequence[Term], bound: Array | float) -> None:
        """As many rows as the arrays are long, each sum == its bound."""
        self._equal.add(terms, bound, len(terms[0][0]))

    def fix(self, index: int, value: float) -> None:
        """From now on a variable has this value."""
        self._lower[index] = self._upper[index] = value

    def minimise(self, cost: Terms, whole: Array | None = None) -> LinearSolution:
        """The best point, or Infeasible. Variables in `whole` take whole numbers, and then nothing has a price."""
        from scipy.optimize import linprog  # half of what importing zerostd would take, and few processes plan

        size = len(self._lower)
        objective = numpy.zeros(size)
        for index, factor in cost.items():
            objective[index] += factor
        integrality = None
        if whole is not None:
            integrality = numpy.zeros(size)
            integrality[whole] = 1
        found = linprog(
            objective,
            *self._most.matrix(size),
            *self._equal.matrix(size),
            bounds=numpy.array([self._lower, self._upper]).T,
            method="highs",
            integrality=integrality,
            options=None if whole is None else {"time_limit": MOST_SECONDS, "mip_rel_gap": CLOSE},
        )
        if found.x is None:
            raise Infeasible(found.message)
        if whole is not None:
            return LinearSolution(found.x, float(found.fun), {})
        marginals = found.ineqlin.marginals
        prices = {name: max(0.0, -float(marginals[row])) for name, row in self._names.items()}
        return LinearSolution(found.x, float(found.fun), prices)
