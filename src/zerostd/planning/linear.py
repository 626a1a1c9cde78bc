"""A linear program, solved by scipy's HiGHS. It knows variables and constraints, never what they mean.

A constraint is a sum over numbered variables. Many of them come at once: then each term is an array of variables, one
for each constraint, with their factors. The matrix is a list of such arrays, so thousands of rows are made in no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MOST_SECONDS = 1.5  # for whole numbers; the best found by then is taken
CLOSE = 1e-3  # how far whole numbers may be from the best

Array = numpy.ndarray[Any, Any]
Terms = Mapping[int, float]
Term = tuple[Array, Array | float]  # variables, one for each constraint, and their factors


class Infeasible(Exception):
    """No point satisfies all constraints."""


@dataclass(frozen=True)
class LinearSolution:
    """The values of all variables, what was minimised, and how much less it is for one more of a bound."""

    values: Array
    objective: float
    prices: dict[str, float]  # of named constraints; >= 0


class _Constraints:
    """Constraints of one kind, as three arrays: row, column, factor."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Array, Array, Array]] = []
        self._bounds: list[Array] = []

    def add_one(self, columns: Array, factors: Array, bound: float) -> None:
        """Add one row, a sum of all these."""
        self._add([(columns, factors)], bound, numpy.full(len(columns), self.count), 1)

    def add_many(self, terms: Sequence[Term], bound: Array | float) -> None:
        """Add as many rows as the arrays are long."""
        count = len(terms[0][0])
        self._add(terms, bound, numpy.arange(self.count, self.count + count), count)

    def _add(self, terms: Sequence[Term], bound: Array | float, rows: Array, count: int) -> None:
        for columns, factors in terms:
            self._parts.append((rows, columns, numpy.broadcast_to(factors, columns.shape)))
        self._bounds.append(numpy.broadcast_to(numpy.asarray(bound, float), (count,)))
        self.count += count

    def matrix(self, size: int) -> tuple[csr_array | None, Array | None]:
        from scipy.sparse import csr_array  # see `minimise`

        if not self.count:
            return None, None
        rows, columns, factors = (numpy.concatenate(part) for part in zip(*self._parts, strict=True))
        return csr_array((factors, (rows, columns)), shape=(self.count, size)), numpy.concatenate(self._bounds)


class LinearProgram:
    """A program under construction. Variables are numbers from `variable`, or arrays of them from `variables`."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._at_most = _Constraints()
        self._equal = _Constraints()
        self._names: dict[str, int] = {}

    def variable(self, upper: float = numpy.inf) -> int:
        """Return a new variable from 0 up to a bound."""
        return int(self.variables(1, upper)[0])

    def variables(self, count: int, upper: Array | float = numpy.inf) -> Array:
        """Return as many new variables, from 0 up to their bounds."""
        first = len(self._lower)
        self._lower += [0.0] * count
        self._upper += numpy.broadcast_to(upper, (count,)).astype(float).tolist()
        return numpy.arange(first, first + count)

    def at_most(self, terms: Terms, bound: float, name: str | None = None) -> None:
        """Add sum <= bound. The solution knows the price of a named constraint."""
        if name is not None:
            self._names[name] = self._at_most.count
        columns = numpy.fromiter(terms.keys(), int, len(terms))
        factors = numpy.fromiter(terms.values(), float, len(terms))
        self._at_most.add_one(columns, factors, bound)

    def each_at_most(self, terms: Sequence[Term], bound: Array | float) -> None:
        """Add sum <= bound, as often as the arrays are long."""
        self._at_most.add_many(terms, bound)

    def each_equals(self, terms: Sequence[Term], bound: Array | float) -> None:
        """Add sum == bound, as often as the arrays are long."""
        self._equal.add_many(terms, bound)

    def fix(self, index: int, value: float) -> None:
        """Give a variable this value."""
        self._lower[index] = self._upper[index] = value

    def minimise(self, cost: Terms, whole: Array | None = None) -> LinearSolution:
        """Return the best point, or raise Infeasible. Variables in `whole` take whole numbers; nothing has a price
        then."""
        from scipy.optimize import linprog  # half of what importing zerostd would take, and few processes plan

        size = len(self._lower)
        objective = numpy.zeros(size)
        for index, factor in cost.items():
            objective[index] += factor
        integrality = None
        if whole is not None:
            integrality = numpy.zeros(size)
            integrality[whole] = 1
        result = linprog(
            objective,
            *self._at_most.matrix(size),
            *self._equal.matrix(size),
            bounds=numpy.array([self._lower, self._upper]).T,
            method="highs",
            integrality=integrality,
            options=None if whole is None else {"time_limit": MOST_SECONDS, "mip_rel_gap": CLOSE},
        )
        if result.x is None:
            raise Infeasible(result.message)
        prices = {}
        if whole is None:
            marginals = result.ineqlin.marginals
            prices = {name: max(0.0, -float(marginals[row])) for name, row in self._names.items()}
        return LinearSolution(result.x, float(result.fun), prices)
