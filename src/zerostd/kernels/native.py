"""libzerostd_native through ctypes: loading it once, and one function per native operation.

Arguments come checked from `zerostd.kernels`. The GIL is free while a native call runs. The numbers here are those
of `src/native/zerostd_native.h`.
"""

import ctypes
import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

from zerostd.kernels.halves import Split
from zerostd.kernels.rules import Adagrad, Adam, Rule, Sgd, Step

LIBRARY = Path(__file__).with_name("libzerostd_native.so")
ABI_VERSION = 3
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ADAM, SGD, ADAGRAD = range(3)
NO_DECAY, COUPLED, DECOUPLED = range(3)
NO_MOMENTUM, FIRST, CONTINUED = range(3)
ROOT_MODE = 0x2 | 0x140000 | 0x100  # VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE, as torch has it


class ArraysArgument(ctypes.Structure):
    """`struct zs_arrays`."""

    _fields_ = (("master", ctypes.c_void_p), ("low", ctypes.c_void_p), ("states", ctypes.c_void_p * 2))


class StepArgument(ctypes.Structure):
    """`struct zs_step`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rule", "maximize", "decay", "momentum", "nesterov")),
        *((name, ctypes.c_int32) for name in ("gradient_dtype", "weight_dtype", "num_threads")),
        *((name, ctypes.c_float) for name in ("factor", "rate", "decay_factor", "new_part", "old_part")),
        *((name, ctypes.c_float) for name in ("square_part", "correction", "eps")),
        *(("count", ctypes.c_int64), ("gradient", ctypes.c_void_p)),
        *(("source", ArraysArgument), ("target", ArraysArgument), ("weight", ctypes.c_void_p)),
        *(("root", ctypes.c_void_p), ("root_mode", ctypes.c_int64), ("root_threads", ctypes.c_void_p)),
    )


SIGNATURES = {
    "zs_sum_slices": (
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64),  # received: data, dtype, slices, length
        ctypes.c_float,  # factor
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),  # out: data, dtype, accumulate
        ctypes.c_int32,  # num_threads
    ),
    "zs_update": (ctypes.POINTER(StepArgument),),
    "zs_limit_instructions": (ctypes.c_int32,),
    "zs_square_norm": (
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32),  # data, dtype, count, num_threads
        ctypes.POINTER(ctypes.c_double),  # sum
    ),
    "zs_cast": (
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),  # source: data, dtype; target likewise
        *(ctypes.c_int64, ctypes.c_int32),  # count, num_threads
    ),
    "zs_copy": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),  # source, target, bytes, num_threads
    "zs_touch": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),  # data, bytes, num_threads
    "zs_crc32": (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int32),  # data, bytes, before, is_plain
        ctypes.POINTER(ctypes.c_uint32),  # crc
    ),
}


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
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int32, arguments
    return library


def serves(*tensors: Tensor) -> bool:
    """Whether the library is there and can work on these tensors: on the CPU and contiguous."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors) and load() is not None


def apart(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share no memory."""
    return one.data_ptr() + one.nbytes <= other.data_ptr() or other.data_ptr() + other.nbytes <= one.data_ptr()


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether every element of one contiguous tensor is where the same element of the other is."""
    return one.data_ptr() == other.data_ptr() and one.itemsize == other.itemsize and one.numel() == other.numel()


def sum_slices(
    received: Tensor, num_slices: int, factor: float, out: Tensor, *, accumulate: bool = False, num_threads: int = 1
) -> None:
    """See `zerostd.kernels.sum_slices`."""
    _call(
        "zs_sum_slices",
        *(received.data_ptr(), DTYPES[received.dtype], num_slices, out.numel()),
        factor,
        *(out.data_ptr(), DTYPES[out.dtype], accumulate),
        num_threads,
    )
    _written(out)


def update(step: Step, num_threads: int) -> None:
    """See `zerostd.kernels.update`."""
    argument = StepArgument(
        **_numbers(step.rule),
        gradient_dtype=DTYPES[step.gradient.dtype],
        weight_dtype=0 if step.weight is None else DTYPES[step.weight.dtype],
        num_threads=num_threads,
        factor=step.factor,
        count=step.gradient.numel(),
        gradient=step.gradient.data_ptr(),
        source=_arrays(step.source),
        target=_arrays(step.target),
        weight=None if step.weight is None else step.weight.data_ptr(),
        **({} if isinstance(step.rule, Sgd) or step.rule.exact_root else torch_root()),
    )
    _call("zs_update", argument)
    _written(*step.outputs)


def _numbers(rule: Rule) -> dict[str, float]:
    """Computed in double as torch.optim does it; ctypes rounds them to fp32, as torch does when it uses them."""
    decay = NO_DECAY if rule.weight_decay == 0 else COUPLED
    numbers = {"maximize": rule.maximize, "decay": decay, "decay_factor": rule.weight_decay}
    match rule:
        case Adam():
            numbers |= {"rule": ADAM, "rate": -rule.rate, "eps": rule.eps, "correction": rule.correction}
            numbers |= {"new_part": 1 - rule.beta1, "old_part": rule.beta2, "square_part": 1 - rule.beta2}
            if decay and rule.decoupled:
                numbers |= {"decay": DECOUPLED, "decay_factor": 1 - rule.lr * rule.weight_decay}
        case Sgd():
            momentum = NO_MOMENTUM if rule.momentum == 0 else FIRST if rule.is_first else CONTINUED
            numbers |= {"rule": SGD, "rate": -rule.lr, "momentum": momentum, "nesterov": rule.nesterov}
            numbers |= {"new_part": 1 - rule.dampening, "old_part": rule.momentum}
        case Adagrad():
            numbers |= {"rule": ADAGRAD, "rate": -rule.rate, "eps": rule.eps}
    return numbers


def _arrays(arrays: tuple[Tensor | Split, ...]) -> ArraysArgument:
    master, *states = arrays
    low = master.low.data_ptr() if isinstance(master, Split) else None
    high = master.high if isinstance(master, Split) else master
    pointers = [state.data_ptr() for state in states if isinstance(state, Tensor)]
    return ArraysArgument(high.data_ptr(), low, (ctypes.c_void_p * 2)(*pointers))


@functools.cache
def torch_root() -> dict[str, int]:
    """The fields of `StepArgument` that say how torch takes square roots; none where it rounds them correctly.

    On x86 torch calls MKL, whose roots may be off by a unit in the last place. Where that is not found, ours are
    correct, and differ from torch's in that last place.
    """
    numbers = torch.linspace(0.0, 4.0, 4096, dtype=torch.float32)
    roots = numbers.sqrt()
    if torch.equal(roots, numbers.double().sqrt().float()):
        return {}
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        root, threads = library.vmsSqrt, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return {}
    root.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    root(numbers.numel(), numbers.data_ptr(), numbers.data_ptr(), ROOT_MODE)
    if not torch.equal(numbers, roots):
        return {}
    return {"root": _address(root), "root_mode": ROOT_MODE, "root_threads": _address(threads)}


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def square_norm(tensor: Tensor, num_threads: int) -> float:
    """The sum in `zerostd.kernels.square_norm`."""
    total = ctypes.c_double()
    _call("zs_square_norm", tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel(), num_threads, ctypes.byref(total))
    return total.value


def cast(source: Tensor, target: Tensor, num_threads: int) -> None:
    """See `zerostd.kernels.cast`."""
    arrays = (source.data_ptr(), DTYPES[source.dtype], target.data_ptr(), DTYPES[target.dtype])
    _call("zs_cast", *arrays, source.numel(), num_threads)
    _written(target)


def copy(source: Tensor, target: Tensor, num_threads: int) -> None:
    """See `zerostd.kernels.copy`."""
    _call("zs_copy", source.data_ptr(), target.data_ptr(), source.nbytes, num_threads)
    _written(target)


def touch(address: int, num_bytes: int, num_threads: int) -> None:
    """See `zerostd.kernels.touch`."""
    _call("zs_touch", address, num_bytes, num_threads)


def crc32(tensor: Tensor, before: int, *, is_plain: bool = False) -> int:
    """See `zerostd.kernels.crc32`. `is_plain`: without the processor's own instructions for it."""
    found = ctypes.c_uint32()
    _call("zs_crc32", tensor.data_ptr(), tensor.nbytes, before, is_plain, ctypes.byref(found))
    return found.value


def _call(name: str, *arguments: object) -> None:
    status = getattr(load(), name)(*arguments)
    assert status == 0, f"{name}: status {status}"


def _written(*tensors: Tensor) -> None:
    torch.autograd.graph.increment_version(tensors)  # torch did not see the write; autograd must
