"""Train PyTorch models that do not fit on one device, with an ordinary training loop.

model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), precision="bf16")

Names are imported when they are first used, so `zerostd --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerostd.api import (
        apply_to_device,
        averaged,
        full_state_dict,
        gathered,
        latest,
        load,
        load_dcp,
        memory,
        no_sync,
        plan,
        prepare,
        release,
        save,
        save_dcp,
    )
    from zerostd.checkpointing.storage.merging import merge
    from zerostd.engine.averaging import Average
    from zerostd.engine.joining import join
    from zerostd.errors import (
        CheckpointError,
        CommunicationError,
        MisuseError,
        NotSupportedError,
        PrepareError,
        StorageError,
        ZerostdError,
    )
    from zerostd.inference.deduplicating import deduplicate
    from zerostd.inference.dispatching import dispatch
    from zerostd.inference.sleeping import sleep, wake
    from zerostd.measuring import measure_machine
    from zerostd.monitoring import Memory
    from zerostd.parameters.deferred import empty_init
    from zerostd.planning import MachineProfile, Plan
    from zerostd.policy import Budget, Placement, Precision, Stage
    from zerostd.reporting.recording import Recording, record
    from zerostd.reporting.tracking import track
    from zerostd.tiers.store import TierStore

__version__ = "0.1.0"

__all__ = [
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

# Where a name is that is not in `api` (functions) or `errors` (names that end in Error).
_MODULES = {
    "Average": "engine.averaging",
    "Budget": "policy",
    "MachineProfile": "planning",
    "Memory": "monitoring",
    "Placement": "policy",
    "Plan": "planning",
    "Precision": "policy",
    "Recording": "reporting.recording",
    "Stage": "policy",
    "TierStore": "tiers.store",
    "deduplicate": "inference.deduplicating",
    "dispatch": "inference.dispatching",
    "empty_init": "parameters.deferred",
    "join": "engine.joining",
    "measure_machine": "measuring",
    "merge": "checkpointing.storage.merging",
    "record": "reporting.recording",
    "sleep": "inference.sleeping",
    "track": "reporting.tracking",
    "wake": "inference.sleeping",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and keep it."""
    if name not in __all__:
        raise AttributeError(f"module 'zerostd' has no attribute {name!r}")
    module = _MODULES.get(name, "errors" if name.endswith("Error") else "api")
    value = getattr(importlib.import_module(f"zerostd.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted({*globals(), *__all__})
