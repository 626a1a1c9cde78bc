"""Secondary shards: the bits of flat stage 3, what makes them stale, what they take, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerostd
from support.agreement import agree
from support.processes import doing, environment
from support.side_by_side import adamw, data, seeded
from zerostd.preparing.accounting import predict
from zerostd.preparing.homes import plan_flats
from zerostd.preparing.options import rules_for

WIDTH = 24
RANKS_PER_NODE = 2
STEPS = 3


class Net(nn.Module):
    """Blocks of uneven sizes, so that slices are padded. `edit` is called in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10 + i), nn.Tanh(), nn.Linear(10 + i, WIDTH)) for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Scaling(nn.Module):
    """Changes its own weight in place in each forward of training, as some normalizations do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return x * self.weight


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.Sequential(Scaling(), nn.Linear(WIDTH, WIDTH)))


class Adapted(Net):
    """Frozen layers with an adapter beside each."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.requires_grad_(False)
            layer.append(nn.Linear(WIDTH, WIDTH))


def loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(data(3, WIDTH, number=number, rank=rank)).square().mean()


def nodes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, RANKS_PER_NODE))


def prepared(mesh: DeviceMesh | None, make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[nn.Module, Any]:
    """A model at stage 3 over all ranks: with a mesh of nodes it keeps secondary shards."""
    placement = zerostd.Placement(**options.pop("placement", {}), secondary_shards=mesh is not None)
    model = seeded(make)
    options = {"stage": 3, "groups": ["layers.*"], **options}
    return zerostd.prepare(model, adamw(model), mesh=mesh, placement=placement, **options)


def sent(model: nn.Module) -> dict[str, int]:
    return dict(zerostd.memory(model).sent)


def flats_of(model: nn.Module) -> list[Any]:
    return [flat for group in model.__dict__["_zerostd"].groups for flat in group.flats]


def held(model: nn.Module) -> int:
    """Bytes of memory that secondary shards have."""
    kept = [flat.secondary for flat in flats_of(model) if flat.secondary is not None]
    return sum(secondary.values.untyped_storage().nbytes() for secondary in kept)


# The bits of flat stage 3

FORMS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "several passes": {"passes": 3},
    "clipped": {"max_grad_norm": 0.05, "passes": 2},
    "recomputed": {"placement": {"activations": "recompute"}},
    "states on the host": {"placement": {"optimizer_states": "host"}},
    "updated inside backward": {"placement": {"optimizer_states": "host"}, "accumulate": 2, "passes": 2},
    "speculative": {
        "placement": {"optimizer_states": "host", "speculate": True},
        "accumulate": 1,
        "max_grad_norm": 0.05,
    },
    "all on the host": {"placement": {"parameters": "host", "gradients": "host", "optimizer_states": "host"}},
    "bf16": {"precision": "bf16", "passes": 2},
    "coded gathers": {"placement": {"codec": {"gather": "int8"}}, "exact": False, "passes": 2},
    "frozen layers": {"make": Adapted, "passes": 2},
    "edited in forward": {"make": Scaled, "passes": 2},
}


def trained(mesh: DeviceMesh | None, rank: int, passes: int = 1, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    model, optimizer = prepared(mesh, **options)
    losses = []
    for step in range(STEPS):
        for micro in range(passes):
            value = loss(model, passes * step + micro, rank)
            losses.append(value.detach())
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh is not None:
        assert sent(model)["node"] > 0
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    return losses, state


def has_the_same_bits(rank: int) -> list[str]:
    mesh = nodes()
    failures = []
    for name, form in FORMS.items():
        doing(name)
        losses, state = trained(mesh, rank, **form)
        flat_losses, flat_state = trained(None, rank, **form)
        if not all(torch.equal(*pair) for pair in zip(losses, flat_losses, strict=True)):
            failures.append(f"{name}, rank {rank}: losses {losses} instead of {flat_losses}")
        failures += [f"{name}, rank {rank}: {key}" for key in state if not torch.equal(state[key], flat_state[key])]
    return failures


def test_training_has_the_bits_of_flat_stage_3(ranks):
    agree(ranks(4, has_the_same_bits))


# What makes them stale, or does not. Each is done after the forward, and after the first pass, of a step.


def evaluated(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with torch.no_grad():
        loss(model, 77, 0)


def written(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with zerostd.gathered(model, write=True), torch.no_grad():
        model.layers[2][0].weight.mul_(1.5)


def written_through_data(model: nn.Module, optimizer: Any, folder: Path) -> None:
    model.layers[2][0].weight.data.mul_(1.5)


def replaced_through_data(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Some ranks hold nothing of this parameter, and must gather it from the others."""
    bias = model.layers[1][0].bias
    bias.data = torch.full(bias.shape, 0.25)


def read(model: nn.Module, optimizer: Any, folder: Path) -> None:
    assert model.layers[2][0].weight.abs().sum() > 0


def slept(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zerostd.sleep(model)
    assert held(model) == 0
    zerostd.wake(model)


def one_rank_slept(model: nn.Module, optimizer: Any, folder: Path) -> None:
    if torch.distributed.get_rank() == 1:
        slept(model, optimizer, folder)


def loaded_a_state_dict(model: nn.Module, optimizer: Any, folder: Path) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in zerostd.full_state_dict(model).items()})


BETWEEN = [evaluated, written, written_through_data, replaced_through_data, read]
BETWEEN_PASSES = [*BETWEEN, slept, one_rank_slept, loaded_a_state_dict]


def with_work_between(mesh: DeviceMesh | None, rank: int, work: Any, *, in_pass: bool) -> list[Tensor]:
    model, optimizer = prepared(mesh)
    losses = []
    for step in range(2):
        for micro in range(2):
            value = loss(model, 2 * step + micro, rank)
            if in_pass and not micro:
                work(model, optimizer, Path())
            value.backward()
            if not in_pass and not micro:
                work(model, optimizer, Path())
            losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    losses += list(zerostd.full_state_dict(model).values())
    zerostd.release(model)
    return losses


def works_between(rank: int) -> list[str]:
    mesh = nodes()
    failures = []
    cases = [(work, True) for work in BETWEEN] + [(work, False) for work in BETWEEN_PASSES]
    for work, in_pass in cases:
        doing(f"{work.__name__}, {in_pass}")
        results = [with_work_between(each, rank, work, in_pass=in_pass) for each in (mesh, None)]
        if not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
            failures.append(f"rank {rank}: {work.__name__}, in a pass: {in_pass}")
    return failures


def test_what_happens_inside_a_step_is_seen_by_its_next_gather(ranks):
    agree(ranks(4, works_between))


def loads(rank: int, folder: str) -> list[str]:
    """What is evaluated before a load leaves secondary shards that must not be taken after it."""
    mesh = nodes()
    path = Path(folder) / "flat"
    model, optimizer = prepared(None, Adapted)
    loss(model, 0, rank).backward()
    with zerostd.gathered(model, write=True), torch.no_grad():
        model.layers[2][0].weight.fill_(0.125)  # frozen
    optimizer.step()
    optimizer.zero_grad()
    zerostd.save(path, model, optimizer)
    expected = loss(model, 1, rank).detach()
    zerostd.release(model)
    failures = []
    for shape in (mesh, None):
        model, optimizer = prepared(shape, Adapted)
        before = loss(model, 1, rank).detach()
        zerostd.load(path, model, optimizer)
        if torch.equal(before, expected) or not torch.equal(loss(model, 1, rank).detach(), expected):
            failures.append(f"rank {rank}, {shape}: {before}, {expected}")
        zerostd.release(model)
    return failures


def test_a_checkpoint_is_seen_after_an_evaluation(ranks, tmp_path):
    agree(ranks(4, loads, str(tmp_path)))


def averages(rank: int) -> list[str]:
    results = []
    for mesh in (nodes(), None):
        model, optimizer = prepared(mesh)
        average = zerostd.averaged(model, 0.5)
        values = []
        for step in range(STEPS):
            loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                values.append(loss(model, 7, rank))
                with average.applied():
                    values.append(loss(model, 7, rank))
                values.append(loss(model, 7, rank))
        results.append(torch.stack(values))
        zerostd.release(model)
    assert results[0][-1] != results[0][-2]
    return [] if torch.equal(*results) else [f"rank {rank}: {results}"]


def test_averages_are_seen_by_evaluations(ranks):
    agree(ranks(4, averages))


# What they save and take


def stay_in_the_node(rank: int) -> list[str]:
    """Evaluations after the first one, and whatever is frozen, cross to no other node."""
    model, optimizer = prepared(nodes(), Adapted)
    counts = []
    for step in range(3):
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(sent(model)["gather"])
    with torch.no_grad():
        for _ in range(3):
            loss(model, 9, rank)
            counts.append(sent(model)["gather"])
    sizes = {True: 0, False: 0}
    for flat in flats_of(model):
        sizes[flat.gradient is not None] += flat.full.nbytes * 3 // 4
    gathered = [now - before for before, now in zip([0, *counts], counts, strict=False)]
    wanted = [sizes[True] + sizes[False], sizes[True], sizes[True], sizes[True], 0, 0]
    zerostd.release(model)
    return [] if gathered == wanted else [f"rank {rank}: {gathered} bytes from all ranks, expected {wanted}"]


def test_only_the_first_gather_after_an_update_crosses(ranks):
    agree(ranks(4, stay_in_the_node))


def buffers(mesh: DeviceMesh | None, make: Callable[[], nn.Module], rank: int, precision: str) -> dict[Any, Any]:
    """Bytes of buffers before backward, before the step and after it; at peak and as predicted."""
    model, optimizer = prepared(mesh, make, precision=precision)
    now = []
    for step in range(2):
        value = loss(model, step, rank)
        for work in (value.backward, optimizer.step, optimizer.zero_grad):
            now.append(zerostd.memory(model).now["device"]["buffers"])
            work()
    runtime = model.__dict__["_zerostd"]
    rules = rules_for(runtime.settings, runtime.world, runtime.blueprints)
    [predicted] = predict(plan_flats(runtime.blueprints, rules), rules).values()
    secondary = {True: 0, False: 0}
    for flat in flats_of(model):
        secondary[flat.gradient is not None] += flat.full.nbytes // RANKS_PER_NODE
    assert held(model) == (0 if mesh is None else secondary[False])
    peak = zerostd.memory(model).peak["device"]["buffers"]
    zerostd.release(model)
    return {"now": now, "peak": peak, "predicted": predicted["buffers"], **secondary}


def take_memory(rank: int, precision: str) -> list[str]:
    """From forward to the step: 1/(ranks per node) of gathered parameters, as predicted; what is frozen stays."""
    mesh = nodes()
    failures = []
    for make in (Net, Adapted):
        kept, flat = (buffers(each, make, rank, precision) for each in (mesh, None))
        taken = [now - before for now, before in zip(kept["now"], flat["now"], strict=True)]
        everything = kept[True] + kept[False]
        if taken != 2 * [everything, everything, kept[False]]:
            failures.append(f"{make.__name__}, rank {rank}: {taken} bytes more, expected {everything}, {kept[False]}")
        if kept["predicted"] - flat["predicted"] != everything or not kept["peak"] <= kept["predicted"]:
            failures.append(f"{make.__name__}, rank {rank}: {kept} is not {everything} more than {flat}")
    return failures


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_taken_from_forward_to_the_step(ranks, precision):
    agree(ranks(4, take_memory, precision))


class Watched(torch.optim.AdamW):
    """Notes what secondary shards hold while groups are updated."""

    models: ClassVar[list[nn.Module]] = []  # prepared ones
    seen: ClassVar[list[int]] = []

    def step(self, closure: Any = None) -> None:
        self.seen.extend(map(held, self.models))
        super().step(closure)


def frees_memory(rank: int) -> list[str]:
    mesh = nodes()
    failures = []
    placement = zerostd.Placement(secondary_shards=True)
    model = seeded(Net)
    model, optimizer = zerostd.prepare(
        model, Watched(model.parameters()), mesh=mesh, placement=placement, groups=["layers.*"]
    )
    loss(model, 0, rank).backward()
    Watched.models.append(model)
    optimizer.step()
    Watched.models.clear()
    if not Watched.seen or any(Watched.seen):
        failures.append(f"rank {rank}: {Watched.seen} bytes while groups are updated")
    zerostd.release(model)
    model, optimizer = prepared(mesh, accumulate=1, placement={"optimizer_states": "host"})
    for step in range(2):
        value = loss(model, step, rank)
        everything = held(model)
        value.backward()
        if step and not held(model) < everything / 2:
            failures.append(f"rank {rank}: {held(model)} of {everything} bytes after updates inside backward")
        optimizer.step()
        optimizer.zero_grad()
    zerostd.release(model)
    return failures


def test_updates_find_their_memory_free(ranks):
    agree(ranks(4, frees_memory))


# What is refused


def refused(rank: int) -> list[str]:
    placement = zerostd.Placement(secondary_shards=True)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("no DeviceMesh.*mesh=init_device_mesh", {}),
        ("no DeviceMesh", {"mesh": nodes().get_group(1)}),
        (r"a mesh of shape \(4,\)", {"mesh": init_device_mesh("cpu", (4,))}),
        (r"a mesh of shape \(4, 1\)", {"mesh": init_device_mesh("cpu", (4, 1))}),
        (r"a mesh of shape \(1, 4\)", {"mesh": init_device_mesh("cpu", (1, 4))}),
        ("stage=2: only stage=3", {"mesh": nodes(), "stage": 2}),
        ("servers=1", {"servers": 1}),
        ("secondary_shards='node'", {"mesh": nodes(), "placement": {"secondary_shards": "node"}}),
        ("needs the optimizer", {"mesh": nodes(), "optimizer": None}),
    ]
    failures = []
    for message, options in cases:
        model = seeded(Net)
        given = {"optimizer": adamw(model), "placement": placement, **options}
        try:
            zerostd.prepare(model, **given)
        except zerostd.PrepareError as error:
            with pytest.raises(zerostd.PrepareError, match=message):
                raise error
        else:
            failures.append(f"rank {rank}: {message} was taken")
        loss(model, 0, rank).backward()  # nothing was changed
    return failures


def test_what_cannot_be_kept_is_refused(ranks):
    agree(ranks(4, refused))


def differ(rank: int) -> str:
    model = seeded(Net)
    placement = zerostd.Placement(secondary_shards=rank != 3)
    try:
        zerostd.prepare(model, adamw(model), mesh=nodes(), stage=3, placement=placement)
    except zerostd.PrepareError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_named(ranks):
    for message in ranks(4, differ):
        assert "rank 0" in message and "rank 3" in message and "the same Placement(secondary_shards=...)" in message


def writes_alone(rank: int) -> str:
    """Writes are collective, but for those inside forward, where parameters show their values: rank 0 makes one."""
    with environment(ZEROSTD_TIMEOUT_S="3"):
        model, _ = prepared(nodes(), Scaled)
    if rank:
        model.layers[1][0].forward = lambda x: x * model.layers[1][0].weight
    with pytest.raises(zerostd.CommunicationError) as caught:
        loss(model, 0, rank).backward()
    return str(caught.value)


def test_a_write_that_one_rank_makes_alone_ends_in_an_error(ranks):
    messages = ranks(4, writes_alone)
    assert all("the gather of group" in message for message in messages)
    assert "rank 1 gave up waiting in the gather of group 'layers.1' inside the node" in messages[1]
