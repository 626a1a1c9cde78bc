"""libzerostd_native through ctypes: loading it once, and one function per native operation.

Arguments come checked from `zerostd.kernels`. The GIL is free while a native call runs. The numbers here are those
of `src/native/zerostd_native.h`.
"""

import ctypes
import functools
import warnings
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("libzerostd_native.so")
ABI_VERSION = 1
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None (with one warning that says why) where it is missing or of another version."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if (found := library.zs_abi_version()) != ABI_VERSION:
            raise OSError(f"{LIBRARY} has ABI version {found}, not {ABI_VERSION}")
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"zerostd runs its CPU operations in torch, which is slower, because the native library does not load "
            f"({error}). Install zerostd again with a C++ compiler at hand, or run `make native` in its sources.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    library.zs_sum_slices.restype = ctypes.c_int32
    library.zs_sum_slices.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64),  # received: data, dtype, slices, length
        ctypes.c_float,  # factor
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),  # out: data, dtype, accumulate
        ctypes.c_int32,  # num_threads
    ]
    return library


def serves(received: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the library is there and can work on these tensors: on the CPU, contiguous and apart in memory."""
    on_cpu = received.device.type == "cpu" and out.device.type == "cpu"
    return on_cpu and received.is_contiguous() and out.is_contiguous() and _apart(received, out) and load() is not None


def sum_slices(
    received: torch.Tensor,
    num_slices: int,
    factor: float,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    num_threads: int = 1,
) -> None:
    """See `zerostd.kernels.sum_slices`."""
    library = load()
    assert library is not None
    status = library.zs_sum_slices(
        *(received.data_ptr(), DTYPES[received.dtype], num_slices, out.numel()),
        factor,
        *(out.data_ptr(), DTYPES[out.dtype], accumulate),
        num_threads,
    )
    assert status == 0, f"zs_sum_slices: status {status}"
    torch.autograd.graph.increment_version(out)  # torch did not see the write; autograd must


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() + one.nbytes <= other.data_ptr() or other.data_ptr() + other.nbytes <= one.data_ptr()
