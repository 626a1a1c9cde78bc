"""Pipeline, expert and context parallelism: each prepared module has its own ranks, and nothing else is needed."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import zerostd
from support.agreement import agree
from support.compare import worst_error
from support.side_by_side import LIMIT, adamw, data, seeded

WIDTH = 16
NUM_MICRO = 4  # batches that a pipeline cuts a step into


def stage_of(number: int) -> nn.Module:
    """One of two stages of a pipeline."""

    def build() -> nn.Module:
        layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers[: 4 - number])

    return seeded(build, seed=number)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipelines(rank: int, schedule: str, level: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    module = stage_of(number)
    names = ["0", "2"]
    module, optimizer = zerostd.prepare(module, adamw(module), mesh=mesh["dp"], stage=level, groups=names)
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    pipeline = kind(stage, NUM_MICRO, loss_fn=square)
    for step in range(3):
        x, target = _pair(step, mesh.get_local_rank("dp"))
        pipeline.step(x) if number == 0 else pipeline.step(target=target)
        optimizer.step()
        optimizer.zero_grad()
    trained = zerostd.full_state_dict(module)
    zerostd.release(module)
    whole = nn.ModuleList(stage_of(number) for number in range(2))
    plain = adamw(whole)
    for step in range(3):
        pairs = [_pair(step, other) for other in range(2)]
        torch.stack([square(whole[1](whole[0](x)), target) for x, target in pairs]).mean().backward()
        plain.step()
        plain.zero_grad()
    worst = worst_error(trained, whole[number].state_dict())
    return [] if worst.error <= LIMIT else [f"rank {rank}, {schedule}, stage {level}: {worst}"]


def _pair(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return data(8, WIDTH, number=2 * step, rank=rank), data(8, WIDTH, number=2 * step + 1, rank=rank)


def all_pipelines(rank: int) -> list[str]:
    return [*pipelines(rank, "gpipe", 3), *pipelines(rank, "1f1b", 2), *pipelines(rank, "1f1b", 3)]


def test_stages_of_a_pipeline_are_prepared_each_on_its_ranks(ranks):
    agree(ranks(4, all_pipelines))


def make_expert(number: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)), seed=10 + number)


def experts(rank: int, level: int) -> list[str]:
    """Two experts, each on the ranks of one column, and a dense part on all. Of each batch the first half goes to the
    first expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    number = mesh.get_local_rank("ep")
    dense = seeded(lambda: nn.Linear(WIDTH, WIDTH), seed=3)
    expert = make_expert(number)
    dense, of_dense = zerostd.prepare(dense, adamw(dense), stage=level)
    expert, of_expert = zerostd.prepare(expert, adamw(expert), stage=level, mesh=mesh["dp"])
    for step in range(3):
        x = dense(data(6, WIDTH, number=step, rank=rank))
        sent = _exchange(x, mesh.get_group("ep"))
        back = _exchange(expert(sent), mesh.get_group("ep"))
        (x + back).square().mean().backward()
        for parameter in expert.parameters():  # it has the tokens of two ranks, and the mean is over four
            parameter.grad.div_(2)
        for optimizer in (of_dense, of_expert):
            optimizer.step()
            optimizer.zero_grad()
    trained = {"dense": zerostd.full_state_dict(dense), "expert": zerostd.full_state_dict(expert)}
    for module in (dense, expert):
        zerostd.release(module)
    whole = nn.ModuleDict({"dense": seeded(lambda: nn.Linear(WIDTH, WIDTH), seed=3)})
    whole.update({str(other): make_expert(other) for other in range(2)})
    plain = adamw(whole)
    for step in range(3):
        losses = []
        for other in range(4):
            x = whole["dense"](data(6, WIDTH, number=step, rank=other))
            losses.append((x + torch.cat([whole["0"](x[:3]), whole["1"](x[3:])])).square().mean())
        torch.stack(losses).mean().backward()
        plain.step()
        plain.zero_grad()
    pairs = {"dense": whole["dense"], "expert": whole[str(number)]}
    worst = {name: worst_error(trained[name], module.state_dict()) for name, module in pairs.items()}
    return [f"rank {rank}, {name}: {value}" for name, value in worst.items() if value.error > LIMIT]


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.all_to_all_single(torch.empty_like(x), x.contiguous(), group=group)


def every_expert(rank: int) -> list[str]:
    return [*experts(rank, 1), *experts(rank, 3)]


def test_experts_are_prepared_on_the_ranks_that_have_the_same(ranks):
    agree(ranks(4, every_expert))


class Gather(torch.autograd.Function):
    """Put the positions of all ranks together. torch's own all_gather has no backward for some of the ranks on gloo."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), dim=1)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    """Causal attention of which a rank of the group has a part of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        first = 0
        if self.group is not None:
            k, v = (Gather.apply(part, self.group) for part in (k, v))
            first = dist.get_rank(self.group) * x.shape[1]
        mask = torch.arange(k.shape[1]) <= first + torch.arange(x.shape[1])[:, None]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def contexts(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    failures = []
    for level in (1, 3):
        model = seeded(lambda: nn.Sequential(Attention(), Attention()))
        for layer in model:
            layer.group = mesh.get_group("cp")
        model, optimizer = zerostd.prepare(model, adamw(model), stage=level, groups=["0", "1"])
        whole = seeded(lambda: nn.Sequential(Attention(), Attention()))
        plain = adamw(whole)
        for step in range(3):
            sequence = data(2, 8, WIDTH, number=step, rank=mesh.get_local_rank("dp"))
            model(sequence.chunk(2, dim=1)[mesh.get_local_rank("cp")]).square().mean().backward()
            torch.stack(
                [whole(data(2, 8, WIDTH, number=step, rank=r)).square().mean() for r in range(2)]
            ).mean().backward()
            for of in (optimizer, plain):
                of.step()
                of.zero_grad()
        worst = worst_error(zerostd.full_state_dict(model), whole.state_dict())
        failures += [] if worst.error <= LIMIT else [f"rank {rank}, stage {level}: {worst}"]
        zerostd.release(model)
    return failures


def test_context_parallel_needs_nothing(ranks):
    agree(ranks(4, contexts))
