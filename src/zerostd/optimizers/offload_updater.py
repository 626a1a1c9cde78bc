"""The earlier place of a number that `replanning/watching.py` reads; it is in `updater.py`."""

from zerostd.optimizers.updater import NUM_FACTORS as NUM_FACTORS
