"""What this machine and this model can do, found by trying: makes profiles for `planning`.

machine.py  a machine's profile, part by part    cache.py     profiles in files, measured again on another machine
rates.py    link, CPU, matrix products, disk     wire.py      collectives among ranks
identity.py which machine this is, what is free  model.py     a model's profile, and its passes timed
trial.py    one forward, counted
"""

from zerostd.measuring.cache import load_or_measure, load_profile
from zerostd.measuring.machine import measure_machine
from zerostd.measuring.rates import TrialSizes

__all__ = ["TrialSizes", "load_or_measure", "load_profile", "measure_machine"]
