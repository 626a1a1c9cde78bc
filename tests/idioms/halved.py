"""Plain torch with bf16 parameters and fp32 masters, by hand: what the form bf16 is compared with.

Each step begins with the masters in place of the parameters and ends with the parameters rounded again. A parameter
that is not its master rounded was written to since, and becomes the master. Inputs of the model are cast, as zerostd
casts them; outputs are cast back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree


def halve(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let a model and its optimizer go on in bf16."""
    masters: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            masters[parameter] = parameter.data
            parameter.data = parameter.data.bfloat16()

    def begin(*_: Any) -> None:
        for parameter, master in masters.items():
            gradient = parameter.grad
            is_written = not torch.equal(master.bfloat16(), parameter.data)
            parameter.grad = None
            parameter.data = parameter.data.float() if is_written else master
            parameter.grad = None if gradient is None else gradient.float()

    def end(*_: Any) -> None:
        for parameter in masters:
            parameter.grad = None
            masters[parameter] = parameter.data
            parameter.data = parameter.data.bfloat16()

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), torch.float32, torch.bfloat16)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_hook(lambda _module, _args, output: _cast(output, torch.bfloat16, torch.float32))


def _cast(tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(new) if tensor.dtype == old else tensor, tree)
