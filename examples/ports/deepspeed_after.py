"""The same script with zerostd: stage 3, optimizer states on the host, bf16, clipping, accumulation, checkpoints.

torchrun --nproc-per-node 2 examples/ports/deepspeed_after.py --checkpoints /tmp/checkpoints
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, next_token_loss

import zerostd

ACCUMULATE = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(checkpoints: str, steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    with zerostd.empty_init():
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    model, optimizer = zerostd.prepare(
        model,
        optimizer,
        stage=3,
        placement=zerostd.Placement(optimizer_states="host"),
        precision="bf16",
        accumulate=ACCUMULATE,
        max_grad_norm=1.0,
    )

    losses, passes = [], []
    for tokens in batches(steps * ACCUMULATE, size=8):
        tokens = tokens.to(DEVICE)
        loss = next_token_loss(model(tokens), tokens)
        (loss / ACCUMULATE).backward()
        passes.append(loss.item())
        if len(passes) == ACCUMULATE:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(passes) / ACCUMULATE)
            passes = []
    zerostd.save(f"{checkpoints}/step-{steps}", model, optimizer)
    return losses  # then: zerostd merge /tmp/checkpoints/step-20 /tmp/checkpoints/model --dtype bf16


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True)
    options = parser.parse_args()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    losses = train(options.checkpoints)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
