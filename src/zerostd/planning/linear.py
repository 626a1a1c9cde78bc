"""A linear program, solved by scipy's HiGHS. It knows variables and constraints, but not their meaning.

A sum is a list of terms: arrays of variables with their factors. A constraint is about the sum over all of them, or
there is one for each place of the arrays; so thousands of rows are made quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MOST_SECONDS = 1.5  # for whole numbers; the best found by then is taken
CLOSE = 1e-3  # how far whole numbers may be from the best

Array = numpy.ndarray[Any, Any]
Term = tuple[Array, Array | float]  # variables and their factors
_Rows = tuple[Sequence[Term], Array]  # and bounds; with one bound, all variables are in its sum


class Infeasible(Exception):
    """No point satisfies all constraints."""


@dataclass(frozen=True)
class LinearSolution:
    """The values of all variables, the minimum, and by how much it falls if a bound grows by one."""

    values: Array
    objective: float
    prices: dict[str, float]  # of named constraints; >= 0


class LinearProgram:
    """A program under construction. Variables are numbers, which `variables` gives out in arrays."""

    def __init__(self) -> None:
        self._lower = numpy.zeros(0)
        self._upper = numpy.zeros(0)
        self._at_most: list[_Rows] = []
        self._equal: list[_Rows] = []
        self._names: dict[str, int] = {}  # of constraints, with their rows

    def variables(self, count: int = 1, upper: Array | float = numpy.inf) -> Array:
        """Return new variables from 0 up to their bounds."""
        first = len(self._lower)
        self._lower = numpy.append(self._lower, numpy.zeros(count))
        self._upper = numpy.append(self._upper, numpy.broadcast_to(upper, count))
        return numpy.arange(first, first + count)

    def fix(self, variables: Array, values: Array | Sequence[float]) -> None:
        self._lower[variables] = values
        self._upper[variables] = values

    def at_most(self, terms: Sequence[Term], bound: float, name: str | None = None) -> None:
        """Add sum <= bound, over all variables. The solution knows the price of a named constraint."""
        if name is not None:
            self._names[name] = sum(len(bounds) for _, bounds in self._at_most)
        self._at_most.append((terms, numpy.array([bound])))

    def each_at_most(self, terms: Sequence[Term], bound: Array | float) -> None:
        """Add sum <= bound, as often as the arrays are long."""
        self._at_most.append((terms, numpy.broadcast_to(bound, terms[0][0].shape)))

    def each_equals(self, terms: Sequence[Term], bound: Array | float) -> None:
        self._equal.append((terms, numpy.broadcast_to(bound, terms[0][0].shape)))

    def minimise(self, cost: Sequence[Term], whole: Array | None = None) -> LinearSolution:
        """Return the best point, or raise Infeasible. With variables in `whole` numbers nothing has a price."""
        from scipy.optimize import linprog  # half of what importing zerostd would take, and few processes plan

        size = len(self._lower)
        objective = numpy.zeros(size)
        for columns, factors in cost:
            objective[columns] += factors
        integrality = None
        if whole is not None:
            integrality = numpy.zeros(size)
            integrality[whole] = 1
        result = linprog(
            objective,
            *_matrix(self._at_most, size),
            *_matrix(self._equal, size),
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


def _matrix(blocks: Sequence[_Rows], size: int) -> tuple[csr_array | None, Array | None]:
    from scipy.sparse import csr_array  # see `minimise`

    if not blocks:
        return None, None
    bounds = numpy.concatenate([bounds for _, bounds in blocks])
    parts = []
    first = 0
    for terms, block in blocks:
        for columns, factors in terms:
            rows = first + (numpy.arange(len(block)) if len(block) > 1 else numpy.zeros(len(columns), int))
            parts.append((rows, columns, numpy.broadcast_to(factors, columns.shape)))
        first += len(block)
    rows, columns, factors = (numpy.concatenate(part) for part in zip(*parts, strict=True))
    return csr_array((factors, (rows, columns)), shape=(len(bounds), size)), bounds
