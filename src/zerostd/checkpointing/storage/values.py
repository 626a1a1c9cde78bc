"""What a user hands over, as JSON and back: numbers, text, lists, dicts, tuples and tensors; never code."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

import torch

from zerostd.errors import CheckpointError

__all__ = ["decode", "dtype_name", "dtype_of", "encode"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
MOST_BITS = 8192  # of a whole number
ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own, without its prefix."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{dtype} has no place in a checkpoint; convert it to one of {', '.join(DTYPES)}")
    return name


def dtype_of(name: Any) -> torch.dtype:
    """The counterpart of dtype_name."""
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"{name!r} is not a dtype of a checkpoint")
    return DTYPES[name]


def encode(value: Any, keep: Callable[[torch.Tensor], int], where: str) -> Any:
    """As JSON. `keep` takes a tensor and returns its number; `where` names the value in errors."""
    try:
        return _encode(value, keep, where)
    except RecursionError as error:
        raise CheckpointError(f"{where[:80]} is too deep, or holds itself") from error


def _encode(value: Any, keep: Callable[[torch.Tensor], int], where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and type(value) in (int, float):
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise CheckpointError(f"{where} is a number of {value.bit_length()} bits, too long for a checkpoint")
        odd = next((name for name, number in ODD.items() if value == number), "nan" if value != value else None)
        return value if odd is None else {"$float": odd}
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        if value.layout is not torch.strided or value.is_meta:
            raise CheckpointError(f"{where} is a tensor of {value.layout} on {value.device}: make it a plain one")
        if value.dim() == 0 and not value.is_complex():
            return {"$number": [name, _encode(value.item(), keep, where)]}
        return {"$tensor": keep(value.detach().resolve_conj().resolve_neg())}
    if isinstance(value, tuple) and type(value) is tuple:
        return {"$tuple": [_encode(item, keep, f"{where}[{place}]") for place, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, keep, f"{where}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, dict):
        items = [(key, _encode(item, keep, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(items)
        return {"$items": [[_encode(key, keep, f"a key of {where}"), item] for key, item in items]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint takes None, bool, int, float, str, list, tuple, dict and "
        "tensors: save what it can be made from again, such as its state_dict()"
    )


def decode(value: Any, get: Callable[[int], torch.Tensor]) -> Any:
    """The counterpart of encode; `get` gives a tensor by its number."""
    try:
        return _decode(value, get)
    except CheckpointError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        said = reprlib.repr(value)[:80]
        raise CheckpointError(f"{said} in the checkpoint is not as it should be: {error!s:.80}") from error


def _decode(value: Any, get: Callable[[int], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "$tensor" and isinstance(inner, int) and not isinstance(inner, bool):
            return get(inner)
        if key == "$float" and inner in ODD:
            return ODD[inner]
        if key == "$tuple" and isinstance(inner, list):
            return tuple(_decode(item, get) for item in inner)
        if key == "$number" and isinstance(inner, list) and len(inner) == 2:
            return _number(_decode(inner[1], get), dtype_of(inner[0]))
        if key == "$items" and isinstance(inner, list) and all(isinstance(pair, list) for pair in inner):
            return {_decode(key, get): _decode(item, get) for key, item in inner}
    odd = next((key for key in value if key.startswith("$")), None)
    if odd is not None:
        raise CheckpointError(
            f"{odd!r} in the checkpoint is not known, or not as it should be: {reprlib.repr(value)[:80]}"
        )
    return {key: _decode(item, get) for key, item in value.items()}


def _number(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(value, bool | int | float):
        raise CheckpointError(f"{reprlib.repr(value)[:80]} in the checkpoint is not a number")
    return torch.tensor(value, dtype=dtype)
