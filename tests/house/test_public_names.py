"""What `zerostd` exports: this list, and nothing without a docstring of its own."""

from __future__ import annotations

import inspect

import pytest

import zerostd

PUBLIC_NAMES = [
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
    "ZerostdError",
    "apply_to_device",
    "empty_init",
    "full_state_dict",
    "gathered",
    "latest",
    "load",
    "measure_machine",
    "memory",
    "merge",
    "no_sync",
    "plan",
    "prepare",
    "record",
    "release",
    "save",
    "track",
]


def test_exported_names_are_these() -> None:
    assert sorted(zerostd.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_has_a_docstring(name: str) -> None:
    public = getattr(zerostd, name)
    own = vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
    assert own and not own.startswith(f"{name}("), f"zerostd.{name} says nothing about itself"  # dataclass's own
