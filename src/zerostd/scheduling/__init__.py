"""When things move: hooks on the user's modules, gathering ahead, reducing behind."""

from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.hooks import Hooks
from zerostd.scheduling.reducing import Reducer

__all__ = ["Gatherer", "Hooks", "Reducer"]
