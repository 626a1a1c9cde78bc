"""Train a small language model on Python's own source, with its state on the device, on the host and on disk.

    python examples/offload.py

The loop is the same in every row; only `Placement` differs. Shown are the loss, which is the same to the last bit on a
CPU, and the bytes that each tier holds. On a machine with a GPU the model trains there, and what rests elsewhere is
updated beside it.
"""

import argparse
import inspect
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import zerostd

LENGTH = 64  # bytes in a sequence
PLACEMENTS = {
    "all on the device": zerostd.Placement(),
    "states on the host": zerostd.Placement(optimizer_states="host"),
    "30 % of the states on the device": zerostd.Placement(optimizer_states={"device": 0.3, "host": 0.7}),
    "everything on the host": zerostd.Placement(parameters="host", gradients="host", optimizer_states="host"),
    "states on disk": zerostd.Placement(optimizer_states="disk"),
}


class Block(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Net(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(num_steps: int, device: torch.device) -> list[torch.Tensor]:
    """Random places in the source of argparse."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - LENGTH - 1, (num_steps, 16), generator=generator)
    return [torch.stack([text[i : i + LENGTH + 1] for i in row]).to(device) for row in starts]


def train(placement: zerostd.Placement, num_steps: int, disk_path: str) -> tuple[float, zerostd.Memory]:
    """The last loss, and what lay where."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net(128, 4).to(device)
    model, optimizer = zerostd.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        precision="bf16" if device.type == "cuda" else "fp32",  # matrix products in bf16 crawl on most processors
        accumulate=1,
        max_grad_norm=1.0,
        placement=placement,
        budget=zerostd.Budget(disk_path=disk_path),
        groups=["blocks.*"],
    )
    for batch in batches(num_steps, device):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = zerostd.memory(model)
    zerostd.release(model)
    return loss.item(), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    print(f"{'placement':<34}{'loss':>10}{'device':>12}{'host':>12}{'disk':>12}   bytes of model state")
    with tempfile.TemporaryDirectory() as disk_path:
        for name, placement in PLACEMENTS.items():
            loss, memory = train(placement, steps, disk_path)
            sizes = "".join(f"{memory.total(tier):>12,}" for tier in ("device", "host", "disk"))
            print(f"{name:<34}{loss:>10.6f}{sizes}", flush=True)


if __name__ == "__main__":
    main()
