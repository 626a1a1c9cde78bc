"""A script for FSDP2: parameters offloaded to the CPU, bf16 with fp32 masters, clipping.

torchrun --nproc-per-node 2 examples/ports/fsdp2_before.py
"""

import os

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, next_token_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policies = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    losses = []
    for tokens in batches(steps, size=8):
        tokens = tokens.to(DEVICE)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    losses = train()
    if dist.get_rank() == 0:
        print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
    dist.destroy_process_group()
