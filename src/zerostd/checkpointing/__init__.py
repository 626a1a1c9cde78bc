"""Save a prepared model, load it on any number of ranks, stage and placement, and load ordinary models.

saving.py     prepared model -> checkpoint                loading.py  checkpoint -> prepared model
importing.py  ordinary model files -> prepared model      storage/    the files
dcp.py        to torch.distributed.checkpoint's format, and from there
generators.py  random generators
full_state.py  prepared model -> state_dict, ordinary model
"""
