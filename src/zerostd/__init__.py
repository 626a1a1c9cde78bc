"""zerostd: train PyTorch models that do not fit, under a plain loop.

model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, precision="bf16")
"""

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
