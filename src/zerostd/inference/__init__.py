"""Models that are not trained, and models that make room for others.

dispatching.py  a model, from memory or from files, into the tiers of a budget
deduplicating.py  models keep equal bytes once
sleeping.py     a model leaves the device, and comes back
"""
