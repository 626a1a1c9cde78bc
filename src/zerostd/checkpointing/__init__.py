"""Shards to files and back, whatever the number of ranks: intervals by name, a manifest, checksums, no pickle."""

from zerostd.checkpointing.directory import latest
from zerostd.checkpointing.manifest import Manifest
from zerostd.checkpointing.reading import Checkpoint
from zerostd.checkpointing.writing import Saving

__all__ = ["Checkpoint", "Manifest", "Saving", "latest"]
