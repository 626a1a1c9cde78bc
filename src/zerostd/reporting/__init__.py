"""Runs: recorded in a directory (docs/run-directory.md) while they train, read back, and shown as one page.

records.py     run.json and the lines: types, and their reader    timeline.py   one step, lane by lane
recording.py   writes them while a model trains                   plans.py      plans against what was measured
tracking.py    a loop with progress, recorded                     report.py     all numbers as plain data
numbers.py     speed, losses, waiting, memory                     page.py       the page: one HTML file
plan_page.py   a plan as a page
exporting.py   for Chrome, Perfetto and TensorBoard               verdict.py    what it amounts to, in sentences
"""

from zerostd.reporting.exporting import trace_of, write_scalars
from zerostd.reporting.page import page_of
from zerostd.reporting.plan_page import plan_page
from zerostd.reporting.records import Run, read_run
from zerostd.reporting.report import report_json, report_of

__all__ = ["Run", "page_of", "plan_page", "read_run", "report_json", "report_of", "trace_of", "write_scalars"]
