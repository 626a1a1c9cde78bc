"""From a module, an optimizer and options to an engine; everything is checked and counted before anything is allocated.

options.py     what cannot be honoured, refused        proposing.py   the plan, where the user left it open
homes.py       the home of every flat's state          accounting.py  the bytes of each tier, beforehand
building.py    memory, groups, runtime, optimizer      groups.py      one group: its flats, shards and gradients
remembering.py plans that trials chose, for later      announcing.py  the line that says what was decided
scaling.py     models in numbers, many world sizes     budgets.py     what a rank may use of each tier
"""
