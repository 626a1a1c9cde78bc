"""What `zerostd` exports: this list, and nothing without a docstring of its own."""

from __future__ import annotations

import inspect

import zerostd
from house.sources import hold

PUBLIC_NAMES = [
    "Average",
    "Budget",
    "CheckpointError",
    "CommunicationError",
    "MachineProfile",
    "Memory",
    "MisuseError",
    "NotSupportedError",
    "Placement",
    "Plan",
    "Precision",
    "PrepareError",
    "Recording",
    "Stage",
    "StorageError",
    "TierStore",
    "ZerostdError",
    "apply_to_device",
    "averaged",
    "deduplicate",
    "dispatch",
    "empty_init",
    "full_state_dict",
    "gathered",
    "join",
    "latest",
    "load",
    "load_dcp",
    "measure_machine",
    "memory",
    "merge",
    "no_sync",
    "plan",
    "prepare",
    "record",
    "release",
    "save",
    "save_dcp",
    "sleep",
    "track",
    "wake",
]


def test_exported_names_are_these() -> None:
    assert sorted(zerostd.__all__) == sorted(PUBLIC_NAMES)


def test_public_names_have_docstrings() -> None:
    hold(f"zerostd.{name} says nothing about itself" for name in PUBLIC_NAMES if not _has_docstring(name))


def _has_docstring(name: str) -> bool:
    """One of its own: not that of a base class, nor the signature that `dataclass` writes."""
    public = getattr(zerostd, name)
    own = vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
    return bool(own) and not own.startswith(f"{name}(")
