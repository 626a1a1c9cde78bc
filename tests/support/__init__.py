"""What the tests share: small models, real ranks, reference trainings and comparisons."""
