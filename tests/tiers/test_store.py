"""A store keeps users' tensors by name in any tier: rows come back as written, in order, within the budget."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerostd
from zerostd import MisuseError, PrepareError
from zerostd.tiers import store as store_module

TIERS = ["device", "host", "disk"]


@pytest.fixture
def store(tmp_path):
    with zerostd.TierStore(budget={"disk_path": str(tmp_path)}) as found:
        yield found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_rows_come_back_as_they_were_written(store, tier, dtype, monkeypatch):
    monkeypatch.setattr(store_module, "TILE_BYTES", 4096 + 512)  # tiles that end inside a page
    whole = torch.arange(500 * 7).remainder(251).view(500, 7).to(dtype)
    stored = store.allocate("rows", (500, 7), dtype, tier=tier)
    assert stored.tier == tier and not stored.read(slice(10, 20)).wait().any()
    stored.write(whole)
    stored.write(whole[:3] + 1, slice(100, 103))
    expected = whole.clone()
    expected[100:103] = whole[:3] + 1
    assert torch.equal(stored.read().wait(), expected)
    out = torch.empty(250, 7, dtype=dtype)
    assert stored.read(slice(90, 340), out=out).wait() is out and torch.equal(out, expected[90:340])


changes = st.lists(st.tuples(st.integers(0, 59), st.integers(1, 30), st.integers(0, 250)), min_size=1, max_size=8)


@given(changes, st.sampled_from(TIERS), st.lists(st.sampled_from(store_module.PRIORITIES), min_size=8, max_size=8))
@settings(max_examples=30, deadline=None)
def test_what_touches_one_tensor_keeps_its_order_whatever_its_priority(changes, tier, priorities):
    with zerostd.TierStore() as store:
        stored = store.allocate("rows", (60, 300), torch.uint8, tier=tier)
        plain = torch.zeros(60, 300, dtype=torch.uint8)
        pairs = []
        for (start, count, value), priority in zip(changes, priorities, strict=False):
            rows = slice(start, min(60, start + count))
            values = torch.full((rows.stop - rows.start, 300), value, dtype=torch.uint8)
            stored.write(values, rows, priority=priority)
            plain[rows] = values
            pairs.append((stored.read(priority="urgent"), plain.clone()))
        for reading, expected in pairs:
            assert torch.equal(reading.wait(), expected)


def test_urgent_reads_overtake_what_waits(store):
    """A job that is held up, one in the background behind it, and an urgent one that comes last."""
    gate = threading.Event()
    order = []
    first = store.allocate("first", (4,))
    others = {name: store.allocate(name, (4,)) for name in ("later", "now")}
    blocked = store._worker.submit(gate.wait)
    background = others["later"].read(priority="background")
    urgent = others["now"].read(priority="urgent")
    store._worker.submit(lambda: order.append((background.is_done(), urgent.is_done())), place=1)
    gate.set()
    blocked.wait()
    background.wait()
    urgent.wait()
    first.synchronize()
    assert order == [(False, True)]


def test_names_statistics_and_moves(store):
    values = torch.randn(2000, 16)
    stored = store.allocate("embedding", (2000, 16), tier="host")
    stored.write(values)
    store.allocate("cache", (10,), torch.int64, tier="disk")
    assert list(store) == ["embedding", "cache"] and len(store) == 2 and "cache" in store
    assert store["embedding"] is stored and stored.nbytes == 128_000
    for tier in ("disk", "device", "host", "disk"):
        store.move("embedding", tier)
        assert stored.tier == tier and torch.equal(stored.read().wait(), values)
    counted = store.statistics()
    assert counted["disk"]["tensors"] == 2 and counted["host"]["tensors"] == 0
    assert counted["disk"]["bytes"] >= 128_000 + 80 and counted["device"]["peak_bytes"] >= 128_000
    assert counted["transfers"] == {"read": 4 * 128_000, "written": 128_000}
    del store["embedding"]
    assert store.statistics()["disk"]["bytes"] < 10_000
    with pytest.raises(MisuseError, match="was deleted"):
        stored.read()


def test_budgets_and_mistakes_are_refused(tmp_path):
    with zerostd.TierStore(budget={"host": "1MiB", "device": "1MiB", "disk_path": str(tmp_path)}) as store:
        store.allocate("half", (1 << 17,), tier="host")
        for tier in ("host", "device"):
            with pytest.raises(PrepareError, match=r"'too much'.*Budget|'too much'.*budget"):
                store.allocate("too much", (1 << 19,), tier=tier)
        assert "too much" not in store
        for wrong in ("half", "", 3):
            with pytest.raises(PrepareError, match="name="):
                store.allocate(wrong, (1,))
        with pytest.raises(PrepareError, match="did you mean 'host'"):
            store.allocate("cpu", (1,), tier="cpu")
        with pytest.raises(KeyError, match="it has half"):
            store["other"]
        half = store["half"]
        with pytest.raises(MisuseError, match="priority='soon'"):
            half.read(priority="soon")
        with pytest.raises(MisuseError, match="without a step"):
            half.read(slice(0, 4, 2))
        with pytest.raises(MisuseError, match="pass the same number, of that dtype"):
            half.write(torch.ones(4, dtype=torch.float64), slice(0, 4))
    with pytest.raises(MisuseError, match="closed"):
        store.allocate("late", (1,))
