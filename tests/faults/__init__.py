"""Faults on purpose: kill, stop, delay, cut off or confuse one rank, and see that all end as the documentation says.

drawing.py  a fault from one number    program.py  what each rank runs    running.py  one fault, from start to outcome
table.py    many outcomes as a table
"""
