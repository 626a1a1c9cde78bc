"""What cannot work is refused before anything changes, in words that name the cause and the remedy."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerostd
from support.compare import assert_bitwise
from support.processes import doing
from support.side_by_side import data, seeded, sgd
from zerostd import CommunicationError, MisuseError, PrepareError
from zerostd.policy import Homes


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.outlet = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.outlet(x)


GROUPS = ["layers.*", "outlet"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def stepped(make: Callable[[], nn.Module] = Net, rules: Any = adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that have trained a step, so that there is something to spoil."""
    model = seeded(make)
    optimizer = rules(model)
    if not any(p.device.type == "meta" for p in model.parameters()) and isinstance(model, Net):
        model(data(3, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def trace(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything about a model and its optimizer that a refusal must leave alone."""
    found: dict[str, Any] = {
        f"{name}.{key}": (type(value), list(value) if isinstance(value, dict) else None)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
    }
    found |= {name: (id(p), p.data_ptr(), p.grad is None, p.requires_grad) for name, p in model.named_parameters()}
    found |= {f"hooks of {n}": bool(p._post_accumulate_grad_hooks) for n, p in model.named_parameters()}
    if isinstance(optimizer, torch.optim.Optimizer):
        found["optimizer"] = [sorted(vars(optimizer)), len(optimizer.state), id(optimizer.param_groups)]
    return found


def refused(
    model: nn.Module, optimizer: Any, *words: str, error: type[Exception] = PrepareError, **options: Any
) -> None:
    """prepare raises `error` with all of `words`, and nothing has changed."""
    before, weights = trace(model, optimizer), {name: t.detach().clone() for name, t in model.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict()) if isinstance(optimizer, torch.optim.Optimizer) else None
    with pytest.raises(error) as caught:
        zerostd.prepare(model, optimizer, **options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert trace(model, optimizer) == before
    if not any(t.is_meta for t in weights.values()):
        assert_bitwise(model.state_dict(), weights)
    if states is not None:
        after = optimizer.state_dict()
        assert after["param_groups"] == states["param_groups"]
        for number, state in states["state"].items():
            assert all(
                torch.equal(torch.as_tensor(after["state"][number][k]), torch.as_tensor(state[k])) for k in state
            )


# -- on one process --


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 7}, ("stage=7", "0", "3")),
        ({"stage": "3"}, ("stage='3'", "data parallel")),
        ({"stage": True}, ("stage=True",)),
        ({"precision": "fp8"}, ("precision='fp8'", "'bf16'")),
        ({"precision": torch.bfloat16}, ("precision=torch.bfloat16", "did you mean 'bf16'?")),
        ({"precision": "bfloat16"}, ("precision='bfloat16'", "did you mean 'bf16'?")),
        ({"placement": "cpu"}, ("placement='cpu'", "Placement(optimizer_states='host')")),
        ({"placement": {"states": "host"}}, ("unknown field 'states'", "optimizer_states")),
        ({"budget": {"gpu": "1GiB"}}, ("unknown field 'gpu'", "did you mean 'device'?")),
        ({"placement": {"optimizer": "host"}}, ("unknown field 'optimizer'", "did you mean 'optimizer_states'?")),
        ({"device": "xla" if not torch.accelerator.is_available() else "nowhere"}, ("device=", "'cpu'")),
        ({"budget": "lots"}, ("'lots' is not a size", "24GiB")),
        ({"budget": 1.5}, ("1.5 is not a size",)),
        ({"budget": "1KiB"}, ("1.00 KiB of the device", "missing", "Budget(device=...)")),
        ({"accumulate": 0}, ("accumulate=0", "1 or more")),
        ({"accumulate": 1.5}, ("accumulate=1.5",)),
        ({"max_grad_norm": -1.0}, ("max_grad_norm=-1.0", "positive")),
        ({"max_grad_norm": float("nan")}, ("max_grad_norm=nan",)),
        ({"placement": zerostd.Placement(optimizer_states="host", speculate=True)}, ("speculate", "max_grad_norm=")),
        ({"budget": zerostd.Budget(device="1KiB")}, ("1.00 KiB of the device", "missing", "Budget(device=...)")),
        (
            {"budget": zerostd.Budget(device="1KiB"), "placement": zerostd.Placement()},
            ("Budget(device='1KiB')", "parameters", "Placement("),
        ),
        ({"budget": zerostd.Budget(host="1000TiB")}, ("Budget(host='1000TiB')", "free", "1024000.00 GiB")),
        ({"plan": "mine.json"}, ("mine.json", "No such file")),
        ({"plan": zerostd.Plan({"*": Homes()}), "stage": 2}, ("plan=", "stage=", "leave")),
        ({"plan": zerostd.Plan({"*": Homes()}, world_size=2)}, ("2 rank(s)", "plan again")),
        ({"plan": zerostd.Plan({"blocks.*": Homes()})}, ("no homes for group", "'*'")),
        ({"groups": ["blocks.*"]}, ("'blocks.*'", "layers.0")),
        ({"groups": "layers.*"}, ("groups='layers.*'", "list")),
    ],
    ids=str,
)
def test_options(options, words):
    refused(*stepped(), *words, **options)


def test_max_grad_norm_without_an_optimizer():
    refused(seeded(Net), None, "max_grad_norm=1.0", "pass it to prepare", max_grad_norm=1.0)


def test_wrong_words_for_tiers_and_sizes():
    with pytest.raises(PrepareError, match="'ram' is not a tier; did you mean 'host'"):
        zerostd.Placement(parameters="ram")
    with pytest.raises(PrepareError, match="'nvme' is not a tier; did you mean 'disk'"):
        zerostd.Placement(optimizer_states={"nvme": 1.0})
    with pytest.raises(PrepareError, match="sum to 1"):
        zerostd.Placement(parameters={"device": 0.5, "host": 0.1})
    with pytest.raises(PrepareError, match="24GiB"):
        zerostd.Budget(device="lots")


def test_dicts_and_sizes_stand_for_placements_and_budgets():
    model, optimizer = stepped()
    prepared, _ = zerostd.prepare(model, optimizer, placement={"optimizer_states": "host"}, budget="1GiB")
    assert zerostd.memory(prepared).now["host"]["optimizer_states"] > 0
    zerostd.release(prepared)


@pytest.mark.parametrize("inner", [False, True], ids=["the model", "a submodule"])
def test_models_that_another_library_wraps(inner):
    wrapped = nn.DataParallel(seeded(Net))
    model = nn.Sequential(wrapped) if inner else wrapped
    refused(model, None, "wrapped in DataParallel", "'0'" if inner else "the model is", "pass the plain module")


def test_a_ddp_model_is_refused_with_the_line_to_change(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(seeded(Net))
        refused(model, None, "wrapped in DistributedDataParallel", "delete the line", "pass the plain module")
        prepared, _ = zerostd.prepare(model.module)
        with pytest.raises(MisuseError, match=r"inside DistributedDataParallel.*delete the line.*model\.module"):
            model(torch.ones(2, 8))
        zerostd.release(prepared)
        prepared, optimizer = zerostd.prepare(*stepped(), stage=3)
        wrapped = nn.parallel.DistributedDataParallel(prepared)
        with pytest.raises(MisuseError, match=r"inside DistributedDataParallel"):
            wrapped(torch.ones(2, 8))
        assert prepared(torch.ones(2, 8)).isfinite().all()  # by itself it goes on
        optimizer.zero_grad()
        zerostd.release(prepared)
        fully_shard(sharded := seeded(Net))
        refused(sharded, None, "FSDPModule", "shards parameters")
    finally:
        dist.destroy_process_group()


def test_a_model_may_run_inside_the_ddp_of_another(tmp_path):
    """A teacher that is prepared, called by a student's loss."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        teacher, _ = zerostd.prepare(*stepped())

        class Student(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = seeded(Net)

            def forward(self, x):
                return self.net(x) - teacher(x).detach()

        student = nn.parallel.DistributedDataParallel(Student())
        student(torch.ones(2, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
        zerostd.release(teacher)
    finally:
        dist.destroy_process_group()


def test_the_optimizer_of_horovod_is_refused_with_the_line_to_change():
    model, _ = stepped()
    # As horovod.torch.DistributedOptimizer makes it: a class of the same name, with its own module
    wrapped = type("AdamW", (torch.optim.AdamW,), {"__module__": "horovod.torch.optimizer"})(model.parameters())
    refused(model, wrapped, "Horovod's DistributedOptimizer", "import zerostd.horovod as hvd")


def test_things_that_are_no_model_or_no_optimizer():
    with pytest.raises(PrepareError, match=r"torch\.nn\.Module, got function"):
        zerostd.prepare(test_options)
    refused(seeded(Net), [1, 2], "torch.optim.Optimizer", "list")
    refused(nn.Sequential(nn.ReLU()), None, "no parameters")
    with pytest.raises(PrepareError, match=r"'weight' is lazy .* one forward before"):
        zerostd.prepare(nn.LazyLinear(3))


def test_optimizer_built_on_other_parameters():
    model, _ = stepped()
    other = torch.optim.AdamW([*model.inlet.parameters(), *seeded(Net, 1).outlet.parameters()])
    refused(model, other, "param_groups[0]['params'][2]", "(4, 16)", "model.to")


@pytest.mark.parametrize(
    "which",
    ["itself", "its child", "its parent", "a shared part"],
)
def test_model_prepared_already(which):
    inner, optimizer = stepped()
    part = inner.layers[0]
    if which == "its child":
        model = nn.Sequential(nn.Linear(8, 8), inner)
    else:
        model = {"itself": inner, "its parent": part}.get(which) or nn.Sequential(part, nn.Linear(16, 2))
    inner, optimizer = zerostd.prepare(inner, optimizer, stage=0)
    before = sorted(part.__dict__)
    try:
        with pytest.raises(PrepareError, match=r"already prepared.*release"):
            zerostd.prepare(model, sgd(model))
        assert sorted(part.__dict__) == before
        inner(data(3, 8)).square().mean().backward()
        optimizer.step()
    finally:
        zerostd.release(inner)


def test_parameters_whose_values_nobody_knows():
    def make() -> nn.Module:
        model = Net()
        model.outlet = nn.Linear(16, 4, device="meta")
        return model

    refused(*stepped(make), "outlet.weight")


@pytest.mark.gpu
def test_parameters_on_two_devices():
    model = seeded(Net)
    model.outlet.cuda()
    refused(model, adamw(model), "'outlet.bias' on cuda", "cpu", "model.to(device)")


def test_tied_pair_of_which_one_trains():
    model = seeded(Net)
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.data, requires_grad=False)
    refused(model, sgd(model), "'layers.0.weight'", "'layers.1.weight'", "requires_grad", "one Parameter object")


def test_two_parameters_over_the_same_memory():
    model = seeded(Net)
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.data[2:])
    refused(model, adamw(model), "'layers.0.weight'", "'layers.1.weight'", "one Parameter object")


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's step by its norm; the name must not be what gives it away."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * float(trust))


TrustRatio = type("TrustRatio", (Lamb,), {})


class Cautious(torch.optim.Optimizer):
    """Lion that leaves out where momentum and gradient differ in sign, and scales the rest up. The first steps tell
    nothing, because both agree everywhere."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            update = momentum.lerp(p.grad, 0.1)
            momentum.lerp_(p.grad, 0.01)
            mask = (update * p.grad > 0).to(p.dtype)
            p.sub_(0.01 * update.sign() * mask / mask.mean().clamp_min(1e-3))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), ("LBFGS", "line search")),
        (lambda model: torch.optim.Adafactor(model.parameters()), ("Adafactor", "rows and columns")),
        (lambda model: torch.optim.SparseAdam(model.parameters()), ("SparseAdam", "sparse")),
        (
            lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
            ("Muon", "orthogonalises"),
        ),
        (lambda model: TrustRatio(model.parameters()), ("TrustRatio", "not element-wise")),
        (lambda model: Cautious(model.parameters()), ("Cautious", "not element-wise")),
    ],
    ids=["LBFGS", "Adafactor", "SparseAdam", "Muon", "the user's", "cautious"],
)
def test_optimizers_that_need_whole_tensors(rules, words):
    model = seeded(Net)
    refused(model, rules(model), *words)


def test_unfreezing_after_prepare():
    model = seeded(Net)
    model.layers[0].requires_grad_(False)
    model, optimizer = zerostd.prepare(model, sgd(model), stage=0)
    with pytest.raises(MisuseError, match=r"'layers\.0\.weight' was frozen .* before zerostd\.prepare"):
        model.layers[0].requires_grad_(True)
    model.layers[0].weight.requires_grad = True
    model(data(3, 8)).square().mean().backward()
    with pytest.raises(MisuseError, match=r"'layers\.0\.weight' was frozen .* before zerostd\.prepare"):
        optimizer.step()
    zerostd.release(model)


def test_calls_that_need_a_prepared_model():
    model = seeded(Net)
    for call in (zerostd.memory, zerostd.release, zerostd.full_state_dict):
        with pytest.raises(MisuseError, match="prepare"):
            call(model)
    for context in (zerostd.no_sync, zerostd.gathered):
        with pytest.raises(MisuseError, match="prepare"), context(model):
            pass


# -- on ranks --


def step_of_unsynced(rank: int) -> None:
    model, optimizer = zerostd.prepare(*stepped(), stage=3, groups=GROUPS)
    with zerostd.no_sync(model):
        model(data(3, 8, rank=rank)).square().mean().backward()
    with pytest.raises(MisuseError, match=r"no_sync.*last backward pass"):
        optimizer.step()
    model(data(3, 8, rank=rank)).square().mean().backward()
    optimizer.step()
    zerostd.release(model)


def test_step_after_passes_without_sync_only(ranks):
    ranks(2, step_of_unsynced)


def different(rank: int, what: str) -> str:
    """Each rank is given another model; what it said."""
    model, optimizer, options = seeded(Net), None, {"stage": 3}
    if what == "shapes" and rank:
        model = seeded(lambda: Net(24))
    elif what == "names" and rank:
        model.exit = model.outlet
        del model.outlet
    elif what == "order" and rank:
        model.inlet, model.outlet, model.layers = (model._modules.pop(n) for n in ("inlet", "outlet", "layers"))
    elif what == "dtypes" and rank:
        model.double()
    elif what == "frozen" and rank:
        model.inlet.requires_grad_(False)
    elif what == "buffers" and rank:
        model.register_buffer("extra", torch.zeros(3))
    elif what == "stage" and rank:
        options["stage"] = 2
    elif what == "precision" and rank:
        options["precision"] = "bf16"
    elif what == "groups":
        options["groups"] = GROUPS if rank else ["inlet"]
    elif what == "depth" and rank:
        model.layers.append(nn.Linear(16, 16))
    optimizer = adamw(model)
    before = trace(model, optimizer)
    with pytest.raises(PrepareError) as caught:
        zerostd.prepare(model, optimizer, **options)
    assert trace(model, optimizer) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shapes", ("inlet.weight (16, 8)", "inlet.weight (24, 8)")),
        ("names", ("outlet.weight", "exit.weight")),
        ("order", ("layers.0.weight", "outlet.weight")),
        ("dtypes", ("float32", "float64")),
        ("frozen", ("inlet.weight", "None")),
        ("buffers", ("extra",)),
        ("stage", ("stage 3", "stage 2")),
        ("precision", ("precision bf16",)),
        ("groups", ("groups",)),
        ("depth", ("layers.2.weight",)),
    ],
)
def test_ranks_with_different(ranks, what, words):
    said = ranks(2, different, what, timeout=60)
    assert said[0] == said[1] and "rank 1" in said[0]
    assert all(word in said[0] for word in words), said[0]


LIMIT_S, LATEST_S = 3.0, 23.0  # after the latter, something else than the limit ended it


def prepare_impatient(model: nn.Module, optimizer: Any, **options: Any) -> tuple[nn.Module, Any]:
    os.environ["ZEROSTD_TIMEOUT_S"] = str(LIMIT_S)
    try:
        return zerostd.prepare(model, optimizer, **options)
    finally:
        del os.environ["ZEROSTD_TIMEOUT_S"]


def waiting(rank: int, folder: str) -> list[tuple[int, str, float]]:
    """At each stage rank 1 skips its second backward: what the other rank said, and how long it waited."""
    said = []
    for stage in (0, 2, 3):
        dist.barrier()
        sign = Path(folder, f"noticed at stage {stage}")
        model, optimizer = prepare_impatient(*stepped(), stage=stage, groups=GROUPS)
        for number in range(2):
            doing(f"stage {stage}, step {number}")
            loss = model(data(3, 8, number=number, rank=rank)).square().mean()
            started = time.monotonic()
            if number == 1 and rank == 1:
                while not sign.exists():  # it is busy elsewhere, and the other notices
                    time.sleep(0.05)
                break
            try:
                loss.backward()
                optimizer.step()
            except CommunicationError as error:
                said.append((stage, str(error), time.monotonic() - started))
                sign.touch()
            optimizer.zero_grad() if number == 0 else None
    return said


def test_a_rank_that_skips_a_backward_is_named_in_time(ranks, tmp_path):
    said = ranks(2, waiting, str(tmp_path))[0]
    assert [stage for stage, _, _ in said] == [0, 2, 3]
    for _, text, seconds in said:
        assert "rank 1 made its last call, forward" in text and "with 1 backward passes" in text, text
        assert "group '" in text and "with 2 backward passes" in text, text
        assert LIMIT_S - 0.5 < seconds < LATEST_S, f"{seconds:.1f} s for a limit of {LIMIT_S} s"


def dying(rank: int, stage: int, file: str) -> None:
    model, optimizer = zerostd.prepare(*stepped(), stage=stage, groups=GROUPS)
    try:
        for number in range(3):
            loss = model(data(3, 8, number=number, rank=rank)).square().mean()
            if number == 1 and rank == 1:
                os._exit(3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except CommunicationError as error:
        Path(file).write_text(str(error))


def test_a_rank_that_dies_is_named(rank_pool, tmp_path):
    file, started = tmp_path / "said", time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 2 failed"):
        rank_pool.run(dying, 3, str(file), world_size=2, timeout=60)
    rank_pool.close()
    assert time.monotonic() - started < 45
    said = file.read_text()
    assert "rank 1 is gone: its process has ended. Its last message" in said, said


class Branching(Net):
    """Takes another branch on each rank: layers of the same size, or not."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.ways = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.ways[dist.get_rank()](self.inlet(x)))


def branching(rank: int, widths: tuple[int, int]) -> str:
    model = seeded(lambda: Branching(widths))
    model, optimizer = prepare_impatient(model, sgd(model), stage=3, groups=["ways.*", "layers.*", "outlet"])
    try:
        for number in range(3):
            model(data(3, 8, number=number, rank=rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except CommunicationError as error:
        time.sleep(1.0)  # both are heard before either goes
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize(
    "widths",
    [
        (16, 16),
        (16, 64),
    ],
    ids=["same size", "other size"],
)
def test_ranks_that_gather_in_different_orders_are_found(ranks, widths):
    """With groups of the same size values would be mixed, with others messages do not fit: neither goes unnoticed."""
    said = ranks(2, branching, widths, timeout=60)
    assert all("order" in text and "'ways.0'" in text and "groups=[" in text for text in said), said
