"""Shards to files and back, for any number of ranks: intervals by name, a manifest, checksums, no pickle.

directory.py  a directory that appears whole or not at all    manifest.py           what is in it, and the rules
writing.py    all ranks write a checkpoint                    reading.py            intervals of it, checked
merging.py    a checkpoint as ordinary safetensors files      safetensors_files.py  one safetensors file
dcp_files.py  torch.distributed.checkpoint's format           remote.py             URLs, with the verbs of paths
"""

from zerostd.checkpointing.storage.directory import latest
from zerostd.checkpointing.storage.manifest import Manifest
from zerostd.checkpointing.storage.reading import Checkpoint
from zerostd.checkpointing.storage.writing import PendingSave, Saving

__all__ = ["Checkpoint", "Manifest", "PendingSave", "Saving", "latest"]
