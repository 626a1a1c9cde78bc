"""DeepSpeed, FSDP2 and torchao, each with optimizer states in host memory: what offload.py compares zerostd with.

A system gets the job and a function that builds the model, and returns a `Trainer`. What it imports and compiles comes
before that function is called, so that it does not count as preparing. DeepSpeed and torchao are looked for in
`.peers/`, unpacked, as well as among what is installed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent.parent / ".peers"
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
HAS_CUDA = torch.cuda.is_available()

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """What is trained, and for how long."""

    size: str
    micro: int  # sequences in a backward pass
    seq: int  # tokens in a sequence
    accumulate: int  # backward passes in a step
    clip: float  # largest norm of the gradients; 0: any
    recompute: bool
    steps: int
    warm: int
    pieces: int = 1  # of the batch, that the loss is computed in


class Trainer(NamedTuple):
    """A system that is ready to train."""

    label: str
    train_one: Callable[[Sequence[Batch]], Tensor]  # the batches of a step to its mean loss, which nobody waits for
    finish: Callable[[], object] = lambda: None  # waits for what a step left to be done


Build = Callable[[], GPT]


def deepspeed(job: Job, build: Build) -> Trainer:
    """ZeRO-2: bf16 weights and gradients on the device; fp32 masters, moments and their update on the host."""
    make_world()
    if HAS_CUDA:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.init_distributed()
    DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))])  # compiles, unless it has before
    config = {
        "train_micro_batch_size_per_gpu": job.micro,
        "gradient_accumulation_steps": job.accumulate,
        "bf16": {"enabled": True},
        "gradient_clipping": job.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": HAS_CUDA},
        },
    }
    model = build()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), **ADAMW), config=config
    )

    def train_one(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)  # divides by the number of passes
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Trainer(f"DeepSpeed {version('deepspeed')} ZeRO-2, optimizer on CPU", train_one)


def fsdp2(job: Job, build: Build) -> Trainer:
    """CPUOffloadPolicy: fp32 weights, gradients, moments and their update on the host, bf16 copies on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    make_world()
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=HAS_CUDA),
        "mesh": dist.init_device_mesh("cuda" if HAS_CUDA else "cpu", (1,)),
    }
    model = build().to("cpu", torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def train_one(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = model(*batch)
            (loss / job.accumulate).backward()
            losses.append(loss.detach())
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return Trainer("FSDP2, CPUOffloadPolicy, fused CPU AdamW", train_one)


def torchao(job: Job, build: Build) -> Trainer:
    """CPUOffloadOptimizer: the bf16 weights are all there is, no fp32 masters; moments and update on the host."""
    from torchao.optim import CPUOffloadOptimizer

    if job.clip:
        raise NotImplementedError("torchao's CPUOffloadOptimizer cannot clip")
    model = build()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW)

    def train_one(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = model(*batch)
            (loss / job.accumulate).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return Trainer(f"torchao {version('torchao')} CPUOffloadOptimizer, bf16 without masters", train_one)


SYSTEMS: dict[str, Callable[[Job, Build], Trainer]] = {"deepspeed": deepspeed, "fsdp2": fsdp2, "torchao": torchao}


def make_world() -> None:
    """A process group of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    if HAS_CUDA:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    else:
        dist.init_process_group("gloo")
