"""Another plan while training goes on.

adapting.py  observes steps and decides    moving.py  moves states and gradients to their new homes
"""
