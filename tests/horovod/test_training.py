"""A Horovod script with one import changed trains as it does by hand: averages of all ranks' gradients, plain torch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import zerostd
import zerostd.horovod as hvd
from horovod.scripts import STEPS, adamw, by_hand, distance, loss_of, make_model, session, sgd
from zerostd import MisuseError, NotSupportedError

LIMIT = 1e-6
RULES = {"sgd": sgd, "adamw": adamw}


def script(rank: int, rules: str, wrap_first: bool) -> tuple[float, float, int]:
    """The program of the documentation: other values on every rank, until they are broadcast."""
    with session():
        model = make_model(seed=rank)
        optimizer = RULES[rules](model.parameters())
        if not wrap_first:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        if wrap_first:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
            scheduler.step()
        reference, _ = by_hand(RULES[rules], [STEPS] * hvd.size(), scheduled=True)
        states = zerostd.memory(optimizer.container).now["device"]["optimizer_states"]
        saved = model.state_dict()  # as on hvd.rank() == 0 for torch.save
        fresh = make_model(seed=9)
        fresh.load_state_dict(saved)
        assert all(torch.isfinite(value).all() for value in saved.values())
        return distance(model, reference), distance(fresh, model), states


@pytest.mark.parametrize("wrap_first", [True, False], ids=["broadcast after", "broadcast before"])
@pytest.mark.parametrize("rules", RULES)
def test_script_trains_as_by_hand(ranks, rules, wrap_first):
    whole = sum(p.numel() for p in make_model(0).parameters()) * 4 * (1 if rules == "sgd" else 2)
    answers = ranks(2, script, rules, wrap_first)
    for error, copied, states in answers:
        assert error < LIMIT and copied == 0
        assert states == pytest.approx(whole / 2, abs=1024)  # the last rank has the padding
    assert sum(states for _, _, states in answers) == whole


@pytest.mark.parametrize("rules", RULES)
def test_one_process_alone(rules, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    error, copied, _ = script(0, rules, True)
    assert error == 0 and copied == 0  # bitwise plain torch


def other_root(rank: int) -> tuple[float, bool, float]:
    with session():
        model = make_model(seed=rank)
        model[1].running_mean += rank
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        start = distance(model, make_model(seed=1))
        buffer = bool((model[1].running_mean == 1).all())
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        with pytest.raises(NotSupportedError, match="rank 0's values: call it before"):
            hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        for step in range(3):
            loss_of(model, step, rank).backward()
            optimizer.step()
            model.zero_grad()
        return start, buffer, distance(model, by_hand(sgd, [3, 3], seed=1, steps=3)[0])


def test_values_of_another_root_are_not_lost(ranks):
    for start, buffer, trained in ranks(2, other_root):
        assert start == 0 and buffer and trained < LIMIT


def several_passes(rank: int) -> tuple[float, str]:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), backward_passes_per_step=2)
        for step in range(5):
            for number in range(2):
                loss_of(model, 2 * step + number, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        error = distance(model, by_hand(adamw, [5, 5], passes=2, steps=5)[0])
        for number in range(2):
            loss_of(model, number, rank).backward()
        with pytest.raises(MisuseError, match="backward_passes_per_step=2") as raised:
            loss_of(model, 2, rank).backward()
        return error, str(raised.value)


def test_passes_of_a_step_are_summed_and_not_divided(ranks):
    for error, message in ranks(2, several_passes):
        assert error < LIMIT and "pass 3" in message


def combined(rank: int, **options: object) -> tuple[float, float, dict[str, int], str]:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters(), **options)
        for step in range(STEPS):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        mean, total = (by_hand(adamw, [STEPS, STEPS], op=op)[0] for op in ("mean", "sum"))
        memory = zerostd.memory(optimizer.container)
        return distance(model, mean), distance(model, total), memory.sent, memory.gradients


def run_sum(rank: int) -> object:
    return combined(rank, op=hvd.Sum)


def run_compressed(rank: int) -> object:
    return combined(rank, compression=hvd.Compression.fp16)


def run_stage_1(rank: int) -> object:
    return combined(rank, stage=1)


def test_sum_over_ranks(ranks):
    for to_mean, to_sum, _, _ in ranks(2, run_sum):
        assert to_sum < LIMIT < to_mean


def test_compressed_gradients_cross_the_wire_in_half_the_bytes(ranks):
    plain = ranks(2, run_stage_1)
    short = ranks(2, run_compressed)
    for (exact, _, _, _), (rounded, far, sent, form) in zip(plain, short, strict=True):
        assert exact < LIMIT < rounded < 1e-2 < far
        assert "float16" in form
        numel = sum(p.numel() for p in make_model(0).parameters())
        assert STEPS * numel <= sent["reduce"] < STEPS * (numel + 256)  # the half that is not mine, of 2 bytes each


def clipped(rank: int, how: str) -> float:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        for step in range(5):
            loss_of(model, step, rank).backward()
            if how == "torch":
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.clip_grad_norm_(0.2)
                optimizer.step()
            optimizer.zero_grad()
        return distance(model, by_hand(sgd, [5, 5], clip=0.2, steps=5)[0])


@pytest.mark.parametrize("how", ["torch", "optimizer"])
def test_clipping(ranks, how):
    assert max(ranks(2, clipped, how)) < LIMIT


def scaled(rank: int) -> float:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            scaler.scale(loss_of(model, step, rank)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return distance(model, by_hand(sgd, [4, 4], steps=4)[0])


def test_loss_scale_of_torch(ranks):
    assert max(ranks(2, scaled)) < LIMIT


def uneven(rank: int, counts: list[int], clip: float | None) -> tuple[float, int, float]:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if clip is not None:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            scheduler.step()
        last = hvd.join()
        reference, _ = by_hand(sgd, counts, clip=clip, scheduled=True, steps=max(counts))
        error = distance(model, reference)
        hvd.join()  # again, with nothing to do
        return error, last, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("counts", "clip", "last"),
    [([3, 6], None, 1), ([6, 0], 0.2, 0), ([2, 2], None, 1)],
    ids=["rank 0 first", "rank 1 has nothing", "together"],
)
def test_join_follows_ranks_that_have_data(ranks, counts, clip, last):
    for error, joined_last, _ in ranks(2, uneven, counts, clip):
        assert error < LIMIT and joined_last == last


def uneven_synchronized(rank: int) -> str:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        if rank == 0:
            loss_of(model, 0, rank).backward()
            with pytest.raises(NotSupportedError, match=r"optimizer.clip_grad_norm_") as raised:
                optimizer.synchronize()
            optimizer.step()
            with pytest.raises(NotSupportedError, match=r"hvd.allreduce\(\) while 1 rank"):
                hvd.allreduce(torch.ones(1))
            with pytest.raises(NotSupportedError, match=r"optimizer.state_dict\(\) while 1 rank"):
                optimizer.state_dict()
        hvd.join()
        second = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
        with pytest.raises(NotSupportedError, match="2 distributed optimizers"):
            hvd.join()
        del second
        assert hvd.allreduce(torch.ones(1)).item() == 1
        return str(raised.value) if rank == 0 else ""


def test_what_joined_ranks_cannot_follow_is_refused(ranks):
    assert "1 rank(s) are in hvd.join()" in ranks(2, uneven_synchronized)[0]


def failing(rank: int) -> float:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        handle = model[0].register_full_backward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 5, rank).backward()
        handle.remove()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        return distance(model, by_hand(sgd, [3, 3], steps=3)[0])


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_backward_that_fails_is_forgotten(ranks):
    assert max(ranks(2, failing)) < LIMIT


def by_closure(rank: int) -> float:
    with session():
        model = make_model(0)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())

        def closure(step: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss

        for step in range(3):
            assert optimizer.step(functools.partial(closure, step)).isfinite()
        return distance(model, by_hand(sgd, [3, 3], steps=3)[0])


def test_step_with_a_closure(ranks):
    assert max(ranks(2, by_closure)) < LIMIT


def wide_model() -> nn.Module:
    """Layers of 4 MiB and more, each of which travels by itself, and one that is used now and then."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({f"layer{number}": nn.Linear(1024, 1024) for number in range(3)})
    layers["rare"] = nn.Linear(1024, 1024)
    layers["never"] = nn.Linear(4, 4)
    return layers


def wide_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(10 * step + rank))
    for number in range(3):
        x = torch.tanh(model[f"layer{number}"](x))
    return (model["rare"](x) if (step + rank) % 2 else x).square().mean()


def wide(rank: int) -> tuple[float, int, bool]:
    """Ranks that use other parameters than their peers, in several groups, with data for 2, 4 and 3 steps."""
    counts = [2, 4, 3]
    with session():
        model = wide_model()
        reference = wide_model()
        start = reference["never"].weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), named_parameters=model.named_parameters())
        for step in range(counts[rank]):
            wide_loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.join()
        plain = adamw(reference.parameters())
        for step in range(max(counts)):
            for number in (number for number, count in enumerate(counts) if step < count):
                (wide_loss(reference, step, number) / len(counts)).backward()
            plain.step()
            plain.zero_grad()
        untouched = torch.equal(model["never"].weight, start)
        return distance(model, reference), zerostd.memory(optimizer.container).now["device"]["gradients"], untouched


def test_groups_that_some_ranks_use_and_none(ranks):
    whole = sum(p.numel() for p in wide_model().parameters()) * 4
    for error, gradients, untouched in ranks(3, wide):
        assert error < 1e-5 and untouched
        assert gradients == pytest.approx(whole / 3, rel=0.01)
