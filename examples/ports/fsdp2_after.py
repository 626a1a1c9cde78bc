"""The same script with zerostd: state offloaded to the CPU, bf16 with fp32 masters, clipping.

torchrun --nproc-per-node 2 examples/ports/fsdp2_after.py
"""

import os

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, next_token_loss

import zerostd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    model, optimizer = zerostd.prepare(
        model,
        optimizer,
        stage=3,
        precision=zerostd.Precision("bf16, reduced in fp32", compute=torch.bfloat16, reduce=torch.float32),
        placement=zerostd.Placement(parameters="host", gradients="host", optimizer_states="host"),
        accumulate=1,
        max_grad_norm=1.0,
    )

    losses = []
    for tokens in batches(steps, size=8):
        tokens = tokens.to(DEVICE)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    losses = train()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
