"""One optimizer step over flat arrays, in one pass over memory: Adam, AdamW, SGD and Adagrad as torch.optim has them.

In come a rule with its numbers, a gradient and the arrays of the optimizer; out go the same arrays a step further, and
the new weight in its own dtype. On a CPU the bits are those of torch.optim without `foreach` and `fused`.
"""

import torch
from torch import Tensor

from zerostd.kernels import native, reference
from zerostd.kernels.halves import Split
from zerostd.kernels.rules import Arrays, Rule, UpdateArguments


def update(
    rule: Rule,
    gradient: Tensor,
    source: Arrays,
    target: Arrays | None = None,
    *,
    factor: float = 1.0,
    weight: Tensor | None = None,
    num_threads: int = 1,
) -> None:
    """Take one step by `rule`: read `source`, write `target` and `weight`.

    Args:
        rule: Which optimizer, and its numbers for this step.
        gradient: fp32, bf16 or fp16; multiplied by `factor` in fp32 before anything else.
        source: The fp32 master, or a `Split` of it, and then the fp32 states: Adam `exp_avg` and `exp_avg_sq`, Sgd
            `momentum_buffer` (none without momentum), Adagrad `sum`.
        target: As `source`: takes the result, and each array is its own source or apart from all. None: in place.
        factor: 1 over the loss scale, times the clip coefficient, say.
        weight: Takes the new master rounded to nearest even; fp32, bf16 or fp16. May be exactly the gradient's memory
            when both have the same item size; so may the high half of a split target, which itself is the weight.
        num_threads: Most CPU threads to use; the result does not depend on it.

    Raises:
        ValueError: The arguments do not fit each other; says which and how.
    """
    step = UpdateArguments(rule, gradient, factor, tuple(source), tuple(source if target is None else target), weight)
    _check(step, num_threads)
    if native.serves(*step.inputs, *step.outputs):
        native.update(step, num_threads)
    else:
        reference.update(step)


def _check(step: UpdateArguments, num_threads: int) -> None:
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; at least 1 is needed")
    for name, arrays in (("source", step.source), ("target", step.target)):
        if len(arrays) != 1 + step.rule.num_states:
            raise ValueError(f"{name} has {len(arrays)} arrays; {step.rule} takes {1 + step.rule.num_states}")
        for index, array in enumerate(arrays):
            _check_array(f"{name}[{index}]", array, may_split=index == 0)
    if isinstance(step.source[0], Split) != isinstance(step.target[0], Split):
        raise ValueError("source[0] and target[0] must both be split, or neither")
    if isinstance(step.target[0], Split) and step.weight is not None:
        raise ValueError("target[0] is split: its high half is the weight, so weight must be None")
    for name, tensor in (("gradient", step.gradient), ("weight", step.weight)):
        if tensor is not None and tensor.dtype not in native.DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; update takes {', '.join(map(str, native.DTYPES))}")
    for tensor in [*step.inputs, *step.outputs]:
        if tensor.shape != step.gradient.shape or tensor.device != step.gradient.device:
            raise ValueError(
                f"gradient is {tuple(step.gradient.shape)} on {step.gradient.device} and another array "
                f"{tuple(tensor.shape)} on {tensor.device}; they must agree"
            )
    _check_memory(step)


def _check_array(name: str, array: Tensor | Split, *, may_split: bool) -> None:
    if isinstance(array, Split):
        if not may_split or (array.high.dtype, array.low.dtype) != (torch.bfloat16, torch.int16):
            raise ValueError(
                f"{name} is {array.high.dtype} and {array.low.dtype}; only a master is split, bf16 and int16"
            )
    elif array.dtype != torch.float32:
        raise ValueError(f"{name} is {array.dtype}; masters and states are fp32")


def _check_memory(step: UpdateArguments) -> None:
    """Refuse outputs that overlap another array; they may lie exactly on their own source, a weight on the gradient."""
    inputs = step.inputs
    outputs = step.outputs
    num_targets = len(inputs) - 1
    own = dict(enumerate(range(1, num_targets + 1)))  # output: the input that it may share memory with
    landing = 0 if isinstance(step.target[0], Split) else num_targets  # the output that may take the gradient's place
    for index, output in enumerate(outputs):
        for number, tensor in enumerate([*inputs, *outputs[:index]]):
            allowed = number == own.get(index) or (number == 0 and index == landing)
            if not native.apart(output, tensor) and not (allowed and native.same_memory(output, tensor)):
                raise ValueError(
                    f"an output of {output.numel()} elements at {output.data_ptr():#x} overlaps another array at "
                    f"{tensor.data_ptr():#x}; only in place, or a weight on its gradient, may share memory"
                )
