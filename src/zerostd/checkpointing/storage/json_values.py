"""What users hand over, as JSON and back: numbers, text, lists, dicts, tuples and tensors; never code."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zerostd.checkpointing.storage.manifest import DTYPES, dtype_name
from zerostd.errors import CheckpointError

MOST_BITS = 8192  # of a whole number
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

StoreTensor = Callable[[torch.Tensor], int]
LoadTensor = Callable[[int], torch.Tensor]


def encode_value(value: Any, store: StoreTensor, where: str) -> Any:
    """Return a value as JSON. `store` takes a tensor and returns its number; `where` names the value in errors."""
    try:
        return _encode(value, store, where)
    except RecursionError as error:
        raise CheckpointError(f"{where[:80]} is too deep, or holds itself") from error


def _encode(value: Any, store: StoreTensor, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # plain, also if it is of a subclass
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is int:
        if value.bit_length() > MOST_BITS:
            raise CheckpointError(f"{where} is a number of {value.bit_length()} bits, too long for a checkpoint")
        return value
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        if value.layout is not torch.strided or value.is_meta:
            raise CheckpointError(f"{where} is a tensor of {value.layout} on {value.device}: make it a plain one")
        if value.dim() == 0 and not value.is_complex():
            return {"$number": [name, _encode(value.item(), store, where)]}
        return {"$tensor": store(value.detach().resolve_conj().resolve_neg())}
    if isinstance(value, list) or type(value) is tuple:
        items = [_encode(item, store, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [(key, _encode(item, store, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$items": [[_encode(key, store, f"a key of {where}"), item] for key, item in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint takes None, bool, int, float, str, list, tuple, dict and "
        "tensors: save what it can be made from again, such as its state_dict()"
    )


def decode_value(value: Any, load: LoadTensor) -> Any:
    """Return what `encode_value` was given; `load` returns a tensor by its number."""
    try:
        return _decode(value, load)
    except CheckpointError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{reprlib.repr(value):.80} in the checkpoint is not valid: {error!s:.80}") from error


def _decode(value: Any, load: LoadTensor) -> Any:
    match value:
        case list():
            return [_decode(item, load) for item in value]
        case {"$tensor": int(number)} if len(value) == 1 and not isinstance(number, bool):
            return load(number)
        case {"$float": str(name)} if len(value) == 1 and name in NON_FINITE:
            return NON_FINITE[name]
        case {"$tuple": [*items]} if len(value) == 1:
            return tuple(_decode(item, load) for item in items)
        case {"$number": [str(name), encoded]} if len(value) == 1 and name in DTYPES:
            number = _decode(encoded, load)
            if not isinstance(number, bool | int | float):
                raise CheckpointError(f"{reprlib.repr(number):.80} in the checkpoint is not a number")
            return torch.tensor(number, dtype=DTYPES[name])
        case {"$items": [*pairs]} if len(value) == 1 and all(isinstance(pair, list) for pair in pairs):
            return {_decode(key, load): _decode(item, load) for key, item in pairs}
        case dict():
            unknown = next((key for key in value if key.startswith("$")), None)
            if unknown is not None:
                raise CheckpointError(
                    f"{unknown!r} in the checkpoint is not known, or not valid: {reprlib.repr(value):.80}"
                )
            return {key: _decode(item, load) for key, item in value.items()}
    return value


def refuse_tensor(tensor: torch.Tensor | int) -> NoReturn:
    """Store or load tensors where there must be none: among options, states of one value and generators."""
    what = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"tensor {tensor}"
    raise CheckpointError(f"{what} is among options or states of one value, where no tensor can be")
