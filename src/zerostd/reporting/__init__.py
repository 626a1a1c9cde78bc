"""Runs: recorded in a directory (docs/run-directory.md) while they train, read back, and shown as one page.

records.py     run.json and the lines, as types   thinning.py    fewer points where there are many
recording.py   writes them while a model trains   report.py      all numbers as plain data
tracking.py    a loop with progress, recorded     tables.py      the numbers in rows, as people read them
reading.py     reads a directory of them          page.py        the same as HTML, in one file
speeds.py      time, losses, busy and waiting     exporting.py   for Chrome, Perfetto and TensorBoard
memory.py      bytes over time, peaks, leaks
timeline.py    one step, lane by lane
plans.py       plans against what was measured
"""

from zerostd.reporting.exporting import trace_of, write_scalars
from zerostd.reporting.page import page_of
from zerostd.reporting.reading import Run, read_run
from zerostd.reporting.report import report_json, report_of

__all__ = ["Run", "page_of", "read_run", "report_json", "report_of", "trace_of", "write_scalars"]
