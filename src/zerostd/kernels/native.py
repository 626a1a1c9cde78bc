"""libzerostd_native through ctypes: loading it once, and one function per native operation.

Arguments come checked from `zerostd.kernels`. The GIL is free while a native call runs. The numbers here are those
of `src/native/zerostd_native.h`.
"""

import ctypes
import functools
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zerostd.kernels.rules import Adagrad, Adam, Rule, Sgd, Split, UpdateArguments

LIBRARY = Path(__file__).with_name("libzerostd_native.so")
ABI_VERSION = 12
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODECS = {None: 0, torch.uint8: 1, torch.bfloat16: 2}  # by the dtype of coded states
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
        *((name, ctypes.c_int32) for name in ("gradient_dtype", "weight_dtype", "num_threads", "codec")),
        ("key", ctypes.c_uint32),
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
    "zs_encode_blocks": (
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32),  # values: data, dtype, length, bits
        *(ctypes.c_void_p, ctypes.c_int32),  # coded, num_threads
    ),
    "zs_decode_blocks": (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32),  # coded: data, slices, length, bits
        ctypes.c_float,  # factor
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),  # out: data, dtype, accumulate
        ctypes.c_int32,  # num_threads
    ),
    "zs_split_planes": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p),
    "zs_join_planes": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p),
    "zs_update": (ctypes.POINTER(StepArgument),),
    "zs_limit_instructions": (ctypes.c_int32,),
    "zs_crc32": (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int32),  # data, bytes, before, is_plain
        ctypes.POINTER(ctypes.c_uint32),  # crc
    ),
    "zs_crc32_pages": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    "zs_copy_past_caches": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    "zs_open_driver": (ctypes.c_char_p,),
    "zs_driver_parameters": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64),
    "zs_driver_error": (ctypes.c_void_p, ctypes.c_int32),
    "zs_queue_tiles": (ctypes.c_void_p, ctypes.c_void_p),
}
RESULTS = {"zs_open_driver": ctypes.c_void_p, "zs_driver_error": ctypes.c_char_p}  # of the others: a status
MOST_PARAMETERS = 64  # of a kernel on a device


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None (with one warning that says why) where it is missing or of another version."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        version = library.zs_abi_version()
        if version != ABI_VERSION:
            raise OSError(f"{LIBRARY} has ABI version {version}, not {ABI_VERSION}")
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"zerostd runs its CPU operations in torch, which is slower, because the native library does not load "
            f"({error}). Install a C++ compiler and then zerostd again, or run `make native` in its sources.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = RESULTS.get(name, ctypes.c_int32)
        function.argtypes = arguments
    return library


def serves(*tensors: Tensor) -> bool:
    """Return whether the library is loaded and can work on these tensors: on the CPU and contiguous."""
    return all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors) and load() is not None


def apart(*tensors: Tensor) -> bool:
    """Return whether no two of these contiguous tensors share memory."""
    end = 0  # of those before
    for start, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        if start < end:
            return False
        end = start + size
    return True


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether each element of a contiguous tensor is where the same element of the other is."""
    return a.data_ptr() == b.data_ptr() and a.itemsize == b.itemsize and a.numel() == b.numel()


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
    torch.autograd.graph.increment_version(out)  # torch did not see the write; autograd must


def encode_blocks(values: Tensor, bits: int, coded: Tensor, *, num_threads: int = 1) -> None:
    """See `zerostd.kernels.encode_blocks`."""
    length = values.numel()
    _call("zs_encode_blocks", values.data_ptr(), DTYPES[values.dtype], length, bits, coded.data_ptr(), num_threads)


def decode_blocks(
    coded: Tensor, bits: int, out: Tensor, *, num_slices: int, accumulate: bool, num_threads: int = 1
) -> None:
    """See `zerostd.kernels.decode_blocks`."""
    _call(
        "zs_decode_blocks",
        *(coded.data_ptr(), num_slices, out.numel(), bits),
        1.0 / num_slices,
        *(out.data_ptr(), DTYPES[out.dtype], accumulate),
        num_threads,
    )
    torch.autograd.graph.increment_version(out)


def split_planes(values: Tensor, planes: Sequence[Tensor]) -> None:
    """See `zerostd.kernels.split_planes`."""
    _call("zs_split_planes", values.data_ptr(), len(planes[0]), len(planes), _pointers(planes))


def join_planes(planes: Sequence[Tensor], values: Tensor) -> None:
    """See `zerostd.kernels.join_planes`."""
    _call("zs_join_planes", _pointers(planes), len(planes[0]), len(planes), values.data_ptr())


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def update(step: UpdateArguments, num_threads: int) -> None:
    """See `zerostd.kernels.update`."""
    source = _arrays(step.source)
    argument = StepArgument(
        gradient_dtype=DTYPES[step.gradient.dtype],
        num_threads=num_threads,
        factor=float(step.factor),
        codec=CODECS[step.coded_dtype],
        count=step.gradient.numel(),
        gradient=step.gradient.data_ptr(),
        source=source,
        target=source if step.target is step.source else _arrays(step.target),
    )
    if step.weight is not None:
        argument.weight = step.weight.data_ptr()
        argument.weight_dtype = DTYPES[step.weight.dtype]
    _set_rule(argument, step.rule)
    _call("zs_update", argument)
    torch.autograd.graph.increment_version(step.outputs)


def _set_rule(argument: StepArgument, rule: Rule) -> None:
    """Set the numbers of a rule: computed in double and rounded to fp32 by ctypes, as torch does when it uses them."""
    argument.maximize = rule.maximize
    argument.decay = NO_DECAY if rule.weight_decay == 0 else COUPLED
    argument.decay_factor = rule.weight_decay
    match rule:
        case Adam():
            argument.rule = ADAM
            folded = rule.correction if argument.codec else 1.0
            argument.key = rule.key
            argument.rate = -rule.rate * folded
            argument.eps = rule.eps * folded
            argument.new_part = 1 - rule.beta1
            argument.old_part = rule.beta2
            argument.square_part = 1 - rule.beta2
            argument.correction = rule.correction
            if argument.decay and rule.decoupled:
                argument.decay = DECOUPLED
                argument.decay_factor = 1 - rule.lr * rule.weight_decay
        case Sgd():
            argument.rule = SGD
            argument.rate = -rule.lr
            argument.momentum = NO_MOMENTUM if rule.momentum == 0 else FIRST if rule.is_first else CONTINUED
            argument.nesterov = rule.nesterov
            argument.new_part = 1 - rule.dampening
            argument.old_part = rule.momentum
        case Adagrad():
            argument.rule = ADAGRAD
            argument.rate = -rule.rate
            argument.eps = rule.eps
    is_exact = isinstance(rule, Sgd) or rule.exact_root or argument.codec
    root = None if is_exact else torch_root()
    if root is not None:
        argument.root, argument.root_threads = root
        argument.root_mode = ROOT_MODE


def _arrays(arrays: tuple[Tensor | Split, ...]) -> ArraysArgument:
    master, *states = arrays
    low = master.low.data_ptr() if isinstance(master, Split) else None
    high = master.high if isinstance(master, Split) else master
    pointers = [state.data_ptr() for state in states if isinstance(state, Tensor)]
    return ArraysArgument(high.data_ptr(), low, (ctypes.c_void_p * 2)(*pointers))


@functools.cache
def torch_root() -> tuple[int, int] | None:
    """Return the addresses of MKL's square root and of its limit on threads, None where torch does not use them.

    On x86 torch calls MKL, whose roots may be off by a unit in the last place. If MKL is not found, our roots are
    correct, and may differ from torch's in that last place.
    """
    numbers = torch.linspace(0.0, 4.0, 4096, dtype=torch.float32)
    roots = numbers.sqrt()
    if torch.equal(roots, numbers.double().sqrt().float()):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        root = library.vmsSqrt
        limit_threads = library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    root.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    root(numbers.numel(), numbers.data_ptr(), numbers.data_ptr(), ROOT_MODE)
    if not torch.equal(numbers, roots):
        return None
    return _address(root), _address(limit_threads)


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def crc32(tensor: Tensor, before: int, *, is_plain: bool = False) -> int:
    """See `zerostd.kernels.crc32`. `is_plain`: without the CPU's own instructions for it."""
    checksum = ctypes.c_uint32()
    _call("zs_crc32", tensor.data_ptr(), tensor.nbytes, before, is_plain, ctypes.byref(checksum))
    return checksum.value


def crc32_pages(tensor: Tensor, page_bytes: int, out: Tensor) -> None:
    """See `zerostd.kernels.crc32_pages`."""
    _call("zs_crc32_pages", tensor.data_ptr(), tensor.nbytes, page_bytes, out.data_ptr())


def copy_past_caches(source: Tensor, target: Tensor) -> None:
    """See `zerostd.kernels.copy_past_caches`."""
    _call("zs_copy_past_caches", source.data_ptr(), source.nbytes, target.data_ptr())


def open_driver(library: str) -> int | None:
    """Return the functions of a device's driver; None if it is missing, or the native library is."""
    loaded = load()
    return None if loaded is None else loaded.zs_open_driver(library.encode())


def driver_parameters(driver: int, function: int) -> list[int]:
    """Return the bytes of each parameter of a kernel."""
    sizes = (ctypes.c_int64 * MOST_PARAMETERS)()
    library = load()
    assert library is not None
    return sizes[: library.zs_driver_parameters(driver, function, sizes, MOST_PARAMETERS)]


def queue_tiles(driver: int, words: "array[int]") -> None:
    """Queue the tiles of a `struct zs_device_tiles`, given as its words."""
    library = load()
    assert library is not None
    status = library.zs_queue_tiles(driver, words.buffer_info()[0])
    if status > 0:
        name = library.zs_driver_error(driver, status).decode()
        raise RuntimeError(f"the device's driver refused a copy or a launch of a tile: {name} (error {status})")
    assert status == 0, f"zs_queue_tiles: status {status}"


def _call(name: str, *arguments: object) -> None:
    status = getattr(load(), name)(*arguments)
    assert status == 0, f"{name}: status {status}"
