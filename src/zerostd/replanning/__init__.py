"""Changes of the plan during training.

adapting.py  decides when to look for another plan    watching.py  what steps show
trials.py    candidates on real steps                 meter.py     bytes of the device that are allocated
moving.py    states and gradients to their new homes  late.py      an optimizer that is made after prepare
room.py      room for passes, also for larger ones    ranking.py   candidates, beside the steps
"""
