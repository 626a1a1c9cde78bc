"""The command line, a file for each verb.

main.py     the program, and how it fails     measure.py  what this machine can do
plan.py     where model state is kept         sources.py  from options to a model
report.py   what came of a run, as a page     merge.py    a checkpoint becomes an ordinary model
printing.py results as tables, JSON and files doctor.py   whether this machine is as training needs it
machines.py machines known by name            top.py      a run in the terminal, while it goes on
"""
