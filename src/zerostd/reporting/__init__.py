"""What came of a run: from its directory to numbers, and from numbers to one page. docs/run-directory.md is the format.

records.py     one line, checked               reading.py     a directory of them
speeds.py      time, samples, losses           resources.py   busy, waiting, leaks
memory.py      bytes over time, and peaks      timeline.py    one step, lane by lane
plans.py       plans against what happened     thinning.py    fewer points where there are many
report.py      all numbers as plain data       page.py        the same as HTML, in one file
texts.py       numbers as people read them     tables.py      numbers in rows
trace.py       events for Chrome and Perfetto  scalars.py     numbers for TensorBoard
"""

from zerostd.reporting.page import page_of
from zerostd.reporting.reading import Run, read_run
from zerostd.reporting.report import report_json, report_of
from zerostd.reporting.scalars import write_scalars
from zerostd.reporting.trace import trace_of

__all__ = ["Run", "page_of", "read_run", "report_json", "report_of", "trace_of", "write_scalars"]
