"""Save a prepared model, load it on any number of ranks, stage and placement, and load ordinary models.

saving.py         prepared model -> checkpoint            loading.py    checkpoint -> prepared model
model_parts.py    what of a model is saved, by name       importing.py  ordinary model files -> prepared model
random_states.py  generators, saved and restored          two_phase.py  check on all ranks, then apply
storage/          the files
"""
