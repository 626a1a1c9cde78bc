"""`zerostd.dispatch`: any budget gives plain torch's bits, and keeps each weight once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostd
from inference.small import GROUPS, generate, make_empty, num_bytes, save_model, tokens
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader
from zerostd.engine.runtime import runtime_of
from zerostd.parameters import GroupState
from zerostd.scheduling.gathering import NUM_NEIGHBOURS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, int]:
    folder = tmp_path_factory.mktemp("llama")
    model = save_model(folder)
    return folder, model, num_bytes(model)


def budgets(total: int, path: Path) -> dict[str, object]:
    return {
        "all on the device": None,
        "half on the host": {"device": total * 3 // 4},
        "all streamed": total // 2,
        "some on disk": {"device": total * 7 // 10, "host": total // 2, "disk_path": str(path)},
        "max_memory": {0: total * 2 // 3, "cpu": "1GiB"},
    }


@pytest.mark.parametrize("budget", list(budgets(0, Path())))
def test_dispatched_files_generate_as_plain_torch_does(saved, tmp_path: Path, budget: str, monkeypatch) -> None:
    folder, plain, total = saved
    read: dict[str, int] = {}
    read_plainly = SafetensorsReader.read

    def count(self: SafetensorsReader, name: str, low: int, target: torch.Tensor) -> None:
        read[name] = read.get(name, 0) + target.nbytes
        read_plainly(self, name, low, target)

    monkeypatch.setattr(SafetensorsReader, "read", count)
    given = budgets(total, tmp_path)[budget]
    model = zerostd.dispatch(make_empty(), folder, budget=given, groups=GROUPS)
    assert read == {name: parameter.nbytes for name, parameter in plain.named_parameters()}
    for batch_size in (1, 3):
        assert torch.equal(generate(model, batch_size), generate(plain, batch_size))
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(tokens(2)).logits, plain(tokens(2)).logits)
    memory = zerostd.memory(model)
    kept = sum(kinds.get("parameters", 0) for kinds in memory.peak.values())
    assert total <= kept <= total + 4096 * len(runtime_of(model, "memory").groups)  # once; pages off the device
    assert all(set(kinds) <= {"parameters", "buffers"} for kinds in memory.peak.values())
    limit = given if isinstance(given, int) else (given or {}).get("device", (given or {}).get(0))
    if limit is not None:
        assert sum(memory.peak["device"].values()) <= limit


def test_from_pretrained_loads_straight_into_tiers(saved) -> None:
    integration = pytest.importorskip("zerostd.integrations.transformers")
    folder, plain, total = saved
    model = integration.from_pretrained(str(folder), budget=total // 2, groups=GROUPS)
    assert torch.equal(generate(model, 2), generate(plain, 2)) and not model.training
    assert zerostd.memory(model).peak["host"]["parameters"] >= total // 2


def test_prediction_of_a_plan_is_what_is_taken(saved, tmp_path: Path) -> None:
    folder, _, total = saved
    model = make_empty()
    budget = {"device": total * 7 // 10, "host": total // 2, "disk_path": str(tmp_path)}
    plan = zerostd.plan(model, budget=budget, groups=GROUPS)
    zerostd.dispatch(model, folder, budget=budget, groups=GROUPS, plan=plan)
    generate(model, 2)
    peak = zerostd.memory(model).peak
    for tier, kinds in plan.predicted.bytes.items():
        assert peak[tier].get("parameters", 0) == kinds.get("parameters", 0)
        assert 0 <= kinds.get("buffers", 0) - peak[tier].get("buffers", 0) <= 0.35 * kinds.get("buffers", 1)


def test_next_forward_is_on_its_way_when_one_ends(saved) -> None:
    folder, plain, total = saved
    model = zerostd.dispatch(make_empty(), folder, budget=total // 2, groups=GROUPS)
    runtime = runtime_of(model, "memory")
    with torch.no_grad():
        for _ in range(2):
            model(tokens(1))
    streamed = [group for group in runtime.groups if group.gives_back]
    ahead = [group for group in streamed if group.state is not GroupState.RELEASED]
    assert ahead == streamed[: len(ahead)] and len(ahead) >= NUM_NEIGHBOURS - 1
    gathers = runtime.gatherer.sequence
    gathers.clear()
    with torch.no_grad():
        model(tokens(1))
    assert sorted(gathers) == sorted(group.name for group in streamed)  # each once a forward
    with zerostd.gathered(model, write=True):
        model.model.embed_tokens.weight.mul_(2)
    with torch.no_grad():
        plain.model.embed_tokens.weight.mul_(2)
        try:
            assert torch.equal(model(tokens(1)).logits, plain(tokens(1)).logits)
        finally:
            plain.model.embed_tokens.weight.div_(2)


def test_three_threads_infer_at_once(saved) -> None:
    folder, plain, total = saved
    model = zerostd.dispatch(make_empty(), folder, budget=total // 2, groups=GROUPS)
    results: dict[int, torch.Tensor] = {}

    def infer(batch_size: int) -> None:
        results[batch_size] = generate(model, batch_size)

    threads = [threading.Thread(target=infer, args=(batch_size,)) for batch_size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[size], generate(plain, size)) for size in (1, 2, 3))


def test_real_model_is_dispatched_and_given_back(saved) -> None:
    folder, plain, total = saved
    model = save_model(folder)
    zerostd.dispatch(model, budget=total // 2, groups=GROUPS, precision="fp16")
    assert model.lm_head.weight.dtype is torch.float16
    assert sum(kinds.get("parameters", 0) for kinds in zerostd.memory(model).now.values()) < total + 16 * 4096
    zerostd.release(model)
    zerostd.dispatch(model, budget=total // 2, groups=GROUPS)
    assert torch.equal(generate(model, 2), generate(plain, 2))


@pytest.mark.parametrize("call", ["prepare", "apply_to_device"])
def test_frozen_model_without_an_optimizer_is_prepared(saved, call: str) -> None:
    folder, plain, _ = saved
    model = save_model(folder).requires_grad_(False)
    if call == "prepare":
        zerostd.prepare(model)
    else:
        zerostd.apply_to_device(model, "cpu")
    assert torch.equal(generate(model, 2), generate(plain, 2))


def test_masters_are_made_when_an_optimizer_comes(saved) -> None:
    """Until then a model that could train keeps its 16-bit parameters and nothing else."""
    folder, _, total = saved
    losses = []
    for is_late in (False, True):
        model = save_model(folder).train()
        placement = zerostd.Placement(parameters="host")
        if is_late:
            zerostd.prepare(model, placement=placement, groups=GROUPS)
            now = zerostd.memory(model).now
            assert "optimizer_states" not in now["device"] and now["host"]["parameters"] < total + 16 * 4096
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not is_late:
            _, optimizer = zerostd.prepare(model, optimizer, placement=placement, groups=GROUPS)
        for _ in range(3):
            loss = model(tokens(2), labels=tokens(2)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_plan_of_a_batch_says_what_a_pass_takes() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    total = num_bytes(model)
    plan = zerostd.plan(model, budget=total // 2, batch=torch.zeros(4, 256), groups=["*"])
    assert plan.predicted.samples == 4 and plan.predicted.step_s and plan.predicted.samples_per_s
    assert plan.predicted.samples_per_s == 4 / plan.predicted.step_s
    assert "samples per second" in plan.explain() and "A pass takes" in plan.explain()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert zerostd.Plan.from_json(plan.to_json()) == plan


def test_too_small_a_budget_is_refused_with_numbers(saved) -> None:
    folder, _, total = saved
    model = make_empty()
    before = [(parameter.requires_grad, parameter.is_meta) for parameter in model.parameters()]
    with pytest.raises(zerostd.PrepareError, match=r"the device must hold .* \(\d+ bytes\).*Budget\(device=\d+\)"):
        zerostd.dispatch(model, folder, budget=total // 10, groups=GROUPS)
    assert before == [(parameter.requires_grad, parameter.is_meta) for parameter in model.parameters()]
    with pytest.raises(zerostd.PrepareError, match=r"the host must hold .*a disk, with Budget\(disk_path=...\)"):
        zerostd.dispatch(model, folder, budget={"device": total // 2, "host": 4096}, groups=GROUPS)
    zerostd.dispatch(model, folder, budget=total // 2, groups=GROUPS)


def test_bad_input_is_refused_before_anything_changes(saved, tmp_path: Path) -> None:
    folder, _, _ = saved
    model = make_empty()
    with pytest.raises(zerostd.PrepareError, match="a process uses one device"):
        zerostd.dispatch(model, folder, budget={0: "1GiB", 1: "1GiB"})
    with pytest.raises(zerostd.PrepareError, match="'mps' is not a key of max_memory"):
        zerostd.dispatch(model, folder, budget={"cpu": "1GiB", "mps": "1GiB"})
    with pytest.raises(zerostd.CheckpointError, match="is not a model"):
        zerostd.dispatch(model, tmp_path / "nothing")
    torch.save({"lm_head.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(zerostd.CheckpointError, match="do not match the model"):
        zerostd.dispatch(model, tmp_path / "other.pt")
    with torch.device("meta"):
        bare = type(model)(model.config)
    with pytest.raises(zerostd.PrepareError, match=r"inv_freq.*empty_init"):
        zerostd.dispatch(bare, folder)
    zerostd.dispatch(model, folder)
    with pytest.raises(zerostd.PrepareError, match="already prepared"):
        zerostd.dispatch(model, folder)
    with pytest.raises(zerostd.MisuseError, match="was frozen when the model was prepared"):
        model.lm_head.weight.requires_grad_(True)
