"""The exception tree. Every message says what happened, with which value, and what to do.

ZerostdError
├── PrepareError (ValueError)        a model, optimizer or option that prepare refuses; nothing was changed
│   └── NotSupportedError            an option that this version cannot honour
├── MisuseError (RuntimeError)       a call on a prepared model that would do the wrong thing silently
├── CheckpointError (ValueError)     a checkpoint that is damaged, not complete or of another model; nothing was changed
├── CommunicationError (RuntimeError) ranks that disagree, or one that did not respond in time
└── StorageError (RuntimeError)      a transfer between tiers, or the work behind it, failed
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeGuard

LONGEST_MESSAGE = 8_000  # characters


class ZerostdError(Exception):
    """The base class of all zerostd errors. The middle of a very long message, a value that was passed, is left out."""

    def __init__(self, message: str) -> None:
        half = LONGEST_MESSAGE // 2
        super().__init__(message if len(message) <= LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}")


class PrepareError(ZerostdError, ValueError):
    """Raised if a model, an optimizer or an option cannot be prepared. Nothing was changed."""


class NotSupportedError(PrepareError):
    """Raised for an option that this version does not support, instead of ignoring it."""


class MisuseError(ZerostdError, RuntimeError):
    """Raised for a call on a prepared model that would do the wrong thing. The message names the right call."""


class CheckpointError(ZerostdError, ValueError):
    """Raised if a checkpoint cannot be written or read. The message names the file, the tensor and the reason."""


class CommunicationError(ZerostdError, RuntimeError):
    """Raised if ranks disagree, or one does not respond within the time limit. The message names rank and group."""


class StorageError(ZerostdError, RuntimeError):
    """Raised if state cannot be read, written or kept. The message names the file, the offset and the system error."""


# Words of other libraries, and ours.
OTHER_NAMES = {"cpu": "host", "ram": "host", "nvme": "disk", "ssd": "disk", "gpu": "device", "cuda": "device"}
OTHER_NAMES |= {"checkpoint": "recompute", "checkpointing": "recompute"}
OTHER_NAMES |= {"bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16-mixed": "bf16", "float16": "fp16", "half": "fp16"}
OTHER_NAMES |= {"torch.float16": "fp16", "16-mixed": "fp16", "float32": "fp32", "torch.float32": "fp32", "32": "fp32"}


def hint_for(word: object, known: Iterable[str]) -> str:
    """Return a question with the name that the user may have meant and a trailing blank; "" if no name is close."""
    name = str(word).lower()
    close = get_close_matches(OTHER_NAMES.get(name, name), list(map(str, known)), 1)
    return f"did you mean {close[0]!r}? " if close else ""


LARGEST = 2**63 - 1


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether a value that a user gave is a whole number of at least `least`, of 64 bits. True and False do
    not count."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value that a user gave is a real number. True, False and NaN do not count."""
    return value == value if isinstance(value, float) else is_whole(value, -LARGEST)


def check_flag(name: str, value: object, error: type[ZerostdError] = PrepareError) -> None:
    """Raise `error` if a value that a user gave is neither True nor False."""
    if not isinstance(value, bool):
        raise error(f"{name}={value!r} must be True or False")


def check_batches(batches: object, call: str) -> None:
    """Raise MisuseError if a loader that a user gave to `call` has nothing to iterate over."""
    if not any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__")):
        raise MisuseError(
            f"{call} needs an iterable of batches, such as a DataLoader, and got {type(batches).__name__}"
        )
