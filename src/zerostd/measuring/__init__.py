"""Measures this machine and this model, and makes profiles for `planning`.

machine.py   a machine's profile, measured or kept    rates.py  link, CPU, matrix products, disk, collectives
identity.py  which machine this is, what is free      trial.py  one forward, counted
model.py     a model's profile, and its passes timed
"""

from zerostd.measuring.machine import load_or_measure, load_profile, measure_machine
from zerostd.measuring.rates import TrialSizes

__all__ = ["TrialSizes", "load_or_measure", "load_profile", "measure_machine"]
