"""Name handwritten digits by their neighbours: a graph network on scikit-learn's digits, its layers sharded.

    python examples/graph.py [--quick]
    torchrun --nproc-per-node 2 examples/graph.py [--quick]

Each image is a node, joined to the images that look most like it. Labels of one node in ten are known; the others are
learnt through the edges. Every rank sees the whole graph and trains on its part of the known nodes.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn

import zerostd

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NEIGHBOURS, KNOWN = 6, 10  # edges of a node; one node in so many has a label


class Messages(nn.Module):
    """Each node takes the mean of what its neighbours send."""

    def __init__(self, width):
        super().__init__()
        self.send = nn.Linear(width, width)
        self.keep = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes, edges):
        source, target = edges
        messages = self.send(nodes)[source]
        count = torch.zeros(len(nodes), 1).index_add(0, target, torch.ones(len(target), 1))
        received = torch.zeros_like(nodes).index_add(0, target, messages) / count.clamp(min=1)
        return nodes + F.relu(self.norm(self.keep(nodes) + received))


class Network(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.inlet = nn.Linear(64, width)
        self.layers = nn.ModuleList(Messages(width) for _ in range(depth))
        self.outlet = nn.Linear(width, 10)

    def forward(self, images, edges):
        nodes = self.inlet(images)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.outlet(nodes)


def load_graph():
    """Images, labels and edges in both directions, the same on every rank."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    source, target = kneighbors_graph(digits.data, NEIGHBOURS).nonzero()
    edges = torch.tensor([[*source, *target], [*target, *source]])
    return images, labels, edges


def main(steps):
    torch.manual_seed(0)
    images, labels, edges = load_graph()
    order = torch.randperm(len(labels))
    known, unknown = order[: len(order) // KNOWN], order[len(order) // KNOWN :]
    mine = known[: len(known) // WORLD_SIZE * WORLD_SIZE][RANK::WORLD_SIZE]

    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    model, optimizer = zerostd.prepare(model, optimizer, stage=3, groups=["layers.*"])

    for _ in range(steps):
        loss = F.cross_entropy(model(images, edges)[mine], labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        right = (model(images, edges)[unknown].argmax(1) == labels[unknown]).float().mean().item()
    held = sum(zerostd.memory(model).now["device"][kind] for kind in ("parameters", "gradients", "optimizer_states"))
    if RANK == 0:
        print(f"{len(labels):,} nodes, {edges.shape[1]:,} edges, {len(known)} labels, {WORLD_SIZE} rank(s)")
        print(f"loss {loss.item():.4f}, accuracy on nodes without a label {right:.1%} after {steps} steps")
        print(f"model state on one rank {held:,} bytes")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    main(20 if parser.parse_args().quick else 100)
