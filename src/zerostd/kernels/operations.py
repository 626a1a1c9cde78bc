"""The operations with their checks: one optimizer step, the sum of received slices, and the checksum.

Each raises ValueError where its arguments do not fit each other. The native library carries it out where it can, else
`reference`.
"""

import torch
from torch import Tensor

from zerostd.kernels import moments, native, reference
from zerostd.kernels.moments import INT8_AVERAGE
from zerostd.kernels.rules import Adam, Arrays, Rule, Split, UpdateArguments


def update(
    rule: Rule,
    gradient: Tensor,
    source: Arrays,
    target: Arrays | None = None,
    *,
    factor: float | Tensor = 1.0,
    weight: Tensor | None = None,
    num_threads: int = 1,
) -> None:
    """Take one step by `rule` in one pass over memory: read `source`, write `target` and `weight`. On a CPU the bits
    are those of torch.optim without `foreach` and `fused`.

    Args:
        rule: Which optimizer, and its numbers for this step.
        gradient: fp32, bf16 or fp16; multiplied by `factor` in fp32 before anything else.
        source: The fp32 master, or a `Split` of it, and then the fp32 states that `rule.state_names` names. Those of
            Adam may be coded (`moments.py`), as bytes or bf16; its bits are then the same on every device.
        target: As `source`: takes the result, and each array is its own source or apart from all. None: in place.
        factor: Such as the clip coefficient over the loss scale. Of coded states it may be one fp32 number on
            their device.
        weight: Takes the new master rounded to nearest even; fp32, bf16 or fp16. May be exactly the gradient's memory
            when both have the same item size; so may the high half of a split target, which itself is the weight.
        num_threads: Most CPU threads to use; the result does not depend on it.
    """
    source = tuple(source)
    step = UpdateArguments(rule, gradient, factor, source, source if target is None else tuple(target), weight)
    _check_update(step, num_threads)
    if native.serves(*step.distinct):
        native.update(step, num_threads)
    elif step.coded_dtype is not None:
        moments.update(step)
    else:
        reference.update(step)


def _check_update(step: UpdateArguments, num_threads: int) -> None:
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; at least 1 is needed")
    _check_arrays("source", step.source, step)
    if step.target is not step.source:
        _check_arrays("target", step.target, step)
    if step.coded_dtype is not None and not isinstance(step.rule, Adam):
        raise ValueError(f"coded states are Adam's, and the rule is {step.rule}")
    if isinstance(step.source[0], Split) != isinstance(step.target[0], Split):
        raise ValueError("source[0] and target[0] must both be split, or neither")
    if isinstance(step.target[0], Split) and step.weight is not None:
        raise ValueError("target[0] is split: its high half is the weight, so weight must be None")
    for name, tensor in (("gradient", step.gradient), ("weight", step.weight)):
        if tensor is not None and tensor.dtype not in native.DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; update takes {', '.join(map(str, native.DTYPES))}")
    shape = step.gradient.shape
    device = step.gradient.device
    records = shape if step.coded_dtype != torch.uint8 else torch.Size([INT8_AVERAGE.num_elements(shape.numel())])
    for tensor in step.distinct:
        expected = records if tensor.dtype == torch.uint8 else shape
        if tensor.shape != expected or tensor.device != device:
            raise ValueError(
                f"gradient is {tuple(shape)} on {device} and another array "
                f"{tuple(tensor.shape)} on {tensor.device}; they must agree"
            )
    _check_memory(step)


def _check_arrays(name: str, arrays: tuple[Tensor | Split, ...], step: UpdateArguments) -> None:
    num_arrays = 1 + len(step.rule.state_names)
    if len(arrays) != num_arrays:
        raise ValueError(f"{name} has {len(arrays)} arrays; {step.rule} takes {num_arrays}")
    expected = (torch.float32, step.coded_dtype or torch.float32)  # dtypes of the master, and of states
    for index, array in enumerate(arrays):
        if isinstance(array, Split):
            dtypes = (array.high.dtype, array.low.dtype)
            if index or dtypes != (torch.bfloat16, torch.int16):
                raise ValueError(f"{name}[{index}] is a Split of {dtypes}; only a master can be split")
        elif array.dtype != expected[index > 0]:
            raise ValueError(f"{name}[{index}] is {array.dtype}; masters must be fp32, states all fp32 or coded")


def _check_memory(step: UpdateArguments) -> None:
    """Refuse outputs that overlap another array; they may lie exactly on their own source, a weight on the gradient."""
    lands = step.weight is not None and native.same_memory(step.weight, step.gradient)
    if native.apart(*(step.distinct[1:] if lands else step.distinct)):
        return  # as nearly always, so pairs are looked at only to find what is allowed or wrong
    num_inputs = len(step.inputs)
    landing = 0 if isinstance(step.target[0], Split) else num_inputs - 1  # the output that may lie on the gradient
    for index, output in enumerate(step.outputs):
        for number, tensor in enumerate([*step.inputs, *step.outputs[:index]]):
            is_own_source = number == index + 1 < num_inputs
            allowed = is_own_source or (number == 0 and index == landing)
            if not native.apart(output, tensor) and not (allowed and native.same_memory(output, tensor)):
                raise ValueError(
                    f"an output of {output.numel()} elements at {output.data_ptr():#x} overlaps another array at "
                    f"{tensor.data_ptr():#x}; it may share memory only with its own source, or a weight "
                    "with its gradient"
                )


def crc32(tensor: Tensor, before: int = 0) -> int:
    """Return zlib's crc32 of a contiguous tensor on the host, continuing the checksum `before`."""
    _check_summed(tensor)
    return reference.crc32(tensor, before) if native.load() is None else native.crc32(tensor, before)


def crc32_pages(tensor: Tensor, page_bytes: int, out: Tensor) -> None:
    """Write zlib's crc32 of each `page_bytes` of a contiguous tensor on the host to `out`, a row of int32.

    The last page may be shorter. `out` holds the 32 bits of each checksum, which torch shows as a signed number.
    """
    _check_summed(tensor)
    num_pages = -(-tensor.nbytes // page_bytes)
    if out.dtype != torch.int32 or out.shape != (num_pages,) or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} on {out.device}; {tensor.nbytes} bytes in pages of {page_bytes} "
            f"take ({num_pages},) of torch.int32, contiguous and on the host"
        )
    if native.load() is None:
        reference.crc32_pages(tensor, page_bytes, out)
    else:
        native.crc32_pages(tensor, page_bytes, out)


def _check_summed(tensor: Tensor) -> None:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        place = f"on {tensor.device} with strides {tensor.stride()}"
        raise ValueError(f"the checksum of a tensor {place}; it must be contiguous and on the host")


def copy_past_caches(source: Tensor, target: Tensor) -> None:
    """Copy the bytes of a contiguous tensor to another one of the same size, which nobody reads soon. From 4 MiB on it
    takes four fifths of the time of `copy_`."""
    if source.nbytes != target.nbytes or not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError(f"{source.nbytes} bytes do not go into {target.nbytes}; both tensors must be contiguous")
    if native.serves(source, target) and native.apart(source, target):
        native.copy_past_caches(source, target)
    else:
        target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))


def sum_slices(
    received: Tensor, num_slices: int, factor: float, out: Tensor, *, accumulate: bool = False, num_threads: int = 1
) -> None:
    """Sum the equally long slices of a receive buffer in their order: `out = factor * (s0 + s1 + ...)`.

    The sum runs in fp32 from slice 0 to the last, is multiplied by `factor` and rounded once when it is written, so
    the result is the same bits on every rank, with any `num_threads`, native or not. Slices in fp64 are summed in fp64,
    by torch, into an `out` in fp64.

    Args:
        received: `num_slices` slices one after another; bf16, fp16, fp32 or fp64.
        num_slices: How many slices `received` holds.
        factor: Multiplies the sum, as fp32; `1 / world_size` for a mean.
        out: Takes the result, in its own dtype (bf16, fp16 or fp32); as many elements as one slice.
        accumulate: Add the result to `out`, which then must be fp32 or fp64, instead of overwriting it.
        num_threads: The largest number of CPU threads to use.
    """
    _check_slices(received, num_slices, out, accumulate=accumulate, num_threads=num_threads)
    if received.dtype in native.DTYPES and native.serves(received, out) and native.apart(received, out):
        native.sum_slices(received, num_slices, factor, out, accumulate=accumulate, num_threads=num_threads)
    else:
        reference.sum_slices(received, num_slices, factor, out, accumulate=accumulate)


def _check_slices(received: Tensor, num_slices: int, out: Tensor, *, accumulate: bool, num_threads: int) -> None:
    is_double = received.dtype == out.dtype == torch.float64
    for name, tensor in (("received", received), ("out", out)):
        if tensor.dtype not in native.DTYPES and not is_double:
            raise ValueError(f"{name} is {tensor.dtype}; sum_slices takes {', '.join(map(str, native.DTYPES))}")
    if received.device != out.device:
        raise ValueError(f"received is on {received.device} and out on {out.device}; they must share a device")
    if num_slices < 1 or received.numel() != num_slices * out.numel():
        raise ValueError(
            f"received has {received.numel()} elements, which are not num_slices={num_slices} slices of "
            f"out's {out.numel()} elements"
        )
    if accumulate and out.dtype != torch.float32 and not is_double:
        raise ValueError(f"accumulate=True needs an fp32 out, not {out.dtype}, which would lose small addends")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; at least 1 is needed")
