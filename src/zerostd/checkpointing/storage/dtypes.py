"""The dtypes that checkpoints hold, with their names in manifests and in the headers of safetensors files."""

from __future__ import annotations

import torch

from zerostd.errors import CheckpointError

SAFETENSORS_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_BY_CODE = {code: dtype for dtype, code in SAFETENSORS_CODES.items()}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without its prefix. Raises CheckpointError for a dtype that no checkpoint can hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{dtype} cannot be saved in a checkpoint; convert it to one of {', '.join(DTYPES)}")
    return name


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a name that `dtype_name` gave."""
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"{name!r} is not a dtype of a checkpoint")
    return DTYPES[name]
