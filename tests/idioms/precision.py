"""Number formats: autocast, GradScaler, doubles and mixtures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms.loop import Loop, idiom


@idiom(exact=False)
def gradient_scaler(loop: Loop) -> Any:
    """Scale the loss with `GradScaler`: `scale`, `step`, `update`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def gradient_scaler_with_clipping(loop: Loop) -> Any:
    """Unscale with `scaler.unscale_(optimizer)`, clip, then step."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def gradient_scaler_that_skips_a_step(loop: Loop) -> Any:
    """Let `GradScaler` skip a step whose gradients overflowed, and lower the scale."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for index, (x, y) in enumerate(loop.batches(3)):
        loss = F.mse_loss(model(x), y) * (float("inf") if index == 1 else 1.0)
        if loop.active:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return loop.outcome(model, scales=scales)


@idiom
def autocast_to_bf16(loop: Loop) -> Any:
    """Run forward under `torch.autocast` in bf16."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loop.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def double_precision(loop: Loop) -> Any:
    """Train a model in fp64."""
    model = loop.seeded(lambda: nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 4)))
    model, optimizer = loop.prepare(model.double())
    for x, y in loop.batches(2):
        F.mse_loss(model(x.double()), y.double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model(loop.batch(9)[0].double()), loop.weights(model)]


@idiom
def layers_of_different_dtypes(loop: Loop) -> Any:
    """Keep one layer in fp64 and the rest in fp32."""
    model = loop.network()
    model.head.double()
    model.head.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))
    model, optimizer = loop.prepare(model)
    for x, y in loop.batches(2):
        F.mse_loss(model(x).double(), y.double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def weights_in_bf16_without_masters(loop: Loop) -> Any:
    """Train a model that is in bf16 itself (`model.bfloat16()`); zerostd adds fp32 masters, so results are rounded."""
    model = loop.network().bfloat16()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(1):
        F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.dtype == torch.bfloat16 for name, value in loop.weights(model).items()}


@idiom
def default_dtype_changed(loop: Loop) -> Any:
    """Train while `torch.set_default_dtype(torch.float64)` is on."""
    model = loop.network()
    torch.set_default_dtype(torch.float64)
    model, optimizer = loop.prepare(model)
    for x, y in loop.batches(2):
        loop.step(model, optimizer, (x.float(), y.float()))
    torch.set_default_dtype(torch.float32)
    return loop.outcome(model)


@idiom
def fully_deterministic(loop: Loop) -> Any:
    """Train under `torch.use_deterministic_algorithms(True)`."""
    torch.use_deterministic_algorithms(True)
    try:
        model, optimizer = loop.prepare(loop.network())
        loop.train(model, optimizer)
        return loop.outcome(model)
    finally:
        torch.use_deterministic_algorithms(False)
