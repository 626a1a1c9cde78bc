"""A prepared model to a checkpoint and back, at any number of ranks; `storage/` knows the files.

saving.py     what a checkpoint is made of    loading.py     a checkpoint into a prepared model
importing.py  an ordinary model's files       full_state.py  whole parameters, one flat at a time
"""
