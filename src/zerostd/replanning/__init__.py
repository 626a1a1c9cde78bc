"""Changes of the plan during training.

adapting.py  decides when to look for another plan    watching.py  what steps show
trials.py    candidates on real steps                 meter.py     bytes of the device that are allocated
changes.py   what moves from plan to plan             moving.py    states and gradients to their new homes
room.py      room for passes, also for larger ones    ranking.py   candidates, beside the steps
late.py      an optimizer that is made after prepare
"""
