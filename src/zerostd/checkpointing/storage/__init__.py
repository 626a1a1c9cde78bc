"""Shards to files and back, whatever the number of ranks: intervals by name, a manifest, checksums, no pickle."""

from zerostd.checkpointing.storage.directory import latest
from zerostd.checkpointing.storage.manifest import Manifest
from zerostd.checkpointing.storage.reading import Checkpoint
from zerostd.checkpointing.storage.writing import Saving

__all__ = ["Checkpoint", "Manifest", "Saving", "latest"]
