"""The command line, a file for each verb.

main.py     the program, and how it fails     measure.py  what this machine can do
plan.py     what should rest where            sources.py  from options to a model
tables.py   results as tables
"""
