"""One prepared model while it trains.

runtime.py    the parts of a prepared model, wired together
settings.py   its options, with everything decided
agreeing.py   what all ranks must take into a step alike
averaging.py  a running average of its trained parameters
intervals.py  where it keeps what is saved and loaded
joining.py    ranks with different numbers of batches
"""
