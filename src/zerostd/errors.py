"""The exception tree. Every message names what, the value, and the remedy.

ZerostdError
├── PrepareError (ValueError)        a model, optimizer or option that prepare refuses; nothing was changed
│   └── NotSupportedError            an option that this version cannot honour
├── MisuseError (RuntimeError)       a call on a prepared model that would do the wrong thing silently
├── CheckpointError (ValueError)     a checkpoint that is damaged, not complete or of another model; nothing was changed
├── CommunicationError (RuntimeError) ranks that disagree, or one that did not come in time
└── StorageError (RuntimeError)      a transfer between tiers, or the work behind it, failed
"""


class ZerostdError(Exception):
    """The base class of all errors of zerostd."""


class PrepareError(ZerostdError, ValueError):
    """What was passed cannot be prepared; the model and the optimizer were left as they were."""


class NotSupportedError(PrepareError):
    """An option that this version cannot honour. It is refused rather than ignored."""


class MisuseError(ZerostdError, RuntimeError):
    """A call on a prepared model that cannot do what it says; the message names the call that can."""


class CheckpointError(ZerostdError, ValueError):
    """A checkpoint that cannot be written or read as asked; the message names file, tensor and reason."""


class CommunicationError(ZerostdError, RuntimeError):
    """Ranks disagree, or one did not arrive within the time limit; the message names rank and group."""


class StorageError(ZerostdError, RuntimeError):
    """Bytes could not be read, written or kept; the message names the file, the offset and the system's reason."""
