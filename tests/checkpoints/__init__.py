"""A package, so that benchmarks/checkpoints.py is not taken for it."""
