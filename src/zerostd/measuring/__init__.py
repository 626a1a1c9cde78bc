"""What this machine and this model can do, found by trying: emits profiles for `planning`.

machine.py  a machine's profile, part by part    cache.py     kept in a file, measured again when it is another machine
rates.py    link, processor, matrix products     disk.py      reading and writing files
wire.py     collectives among ranks              timing.py    how much is tried, and how it is timed
identity.py which machine this is, what is free
"""

from zerostd.measuring.cache import check_is_here, load_or_measure, load_profile
from zerostd.measuring.machine import measure_machine
from zerostd.measuring.timing import TrialSizes

__all__ = ["TrialSizes", "check_is_here", "load_or_measure", "load_profile", "measure_machine"]
