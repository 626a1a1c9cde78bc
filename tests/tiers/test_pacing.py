"""Who is served first, and when background work stops: orders and bytes, with the threads and files of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd.checkpointing.storage import writing
from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers import Worker
from zerostd.tiers import store as store_module
from zerostd.tiers.disk import Disk
from zerostd.tiers.extents import BLOCK_BYTES, Extent
from zerostd.tiers.host import Host
from zerostd.tiers.pacing import LinkPace, Priority, at, current

CPU = torch.device("cpu")
NUM_TILES = 24


def test_a_tile_is_followed_by_a_pause_while_others_ask() -> None:
    pace = LinkPace(0.25)
    assert pace.pause(100.0) == 0, "nobody else has ever asked"
    pace.ask()
    assert pace.pause(100.0) == 300.0
    assert pace.pause(100.0, num_threads=4) == 1500.0, "four threads take a quarter together"
    time.sleep(0.02)
    assert pace.pause(0.001) == 0, "nobody has asked for a cycle of 4 ms"
    assert pace.pause(200.0) == 600.0


def test_without_a_share_nothing_stops() -> None:
    for pace in (LinkPace(), LinkPace(1.0)):
        pace.ask()
        assert pace.pause(5.0) == 0


@pytest.mark.parametrize("share", [0, -0.1, 1.5, True, "half"])
def test_a_share_that_is_none_is_refused(share: Any, tmp_path: Path) -> None:
    with pytest.raises(zerostd.PrepareError, match=r"Budget\(background="):
        zerostd.TierStore(budget={"background": share})
    model = nn.Linear(4, 4)
    with pytest.raises(zerostd.PrepareError, match=r"Budget\(background="):
        zerostd.prepare(model, placement={"parameters": "host"}, budget={"background": share})
    assert type(model.weight) is nn.Parameter


def test_priorities_belong_to_a_thread() -> None:
    seen: list[Priority] = []
    with at(Priority.BACKGROUND):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        with at(Priority.URGENT):
            seen.append(current())
        seen.append(current())
    assert seen == [Priority.PREFETCH, Priority.URGENT, Priority.BACKGROUND]
    assert current() is Priority.PREFETCH


# A disk


def test_a_disk_serves_the_most_urgent_request_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A background write of many blocks, one of which is under way; then reads of all priorities."""
    disk = Disk(str(tmp_path), Ledger(), num_requests=1)
    host = Host(CPU, Ledger(), 1)
    gate = threading.Event()
    begun = threading.Event()
    order: list[tuple[str, int]] = []
    for verb in ("read", "write"):
        move = getattr(Extent, verb)

        def recorded(extent: Extent, offset: int, *rest: Any, verb: str = verb, move: Any = move) -> None:
            order.append((verb if extent is written else names[extent], offset // BLOCK_BYTES))
            begun.set()
            assert gate.wait(60)
            move(extent, offset, *rest)

        monkeypatch.setattr(Extent, verb, recorded)
    written = disk.allocate(6 * BLOCK_BYTES, Kind.BUFFERS)
    extents = {priority: disk.allocate(4096, Kind.BUFFERS) for priority in Priority}
    names = {extent: priority.name for priority, extent in extents.items()}
    memory = host.allocate(6 * BLOCK_BYTES, Kind.BUFFERS)
    with at(Priority.BACKGROUND):
        transfers = [disk.write(written, 0, memory)]
    assert begun.wait(60)
    for priority in reversed(Priority):
        with at(priority):
            transfers.append(disk.read(extents[priority], 0, host.allocate(4096, Kind.BUFFERS)))
    gate.set()
    for transfer in transfers:
        transfer.wait()
    rest = [("write", index) for index in range(1, 6)]
    assert order == [("write", 0), ("URGENT", 0), ("PREFETCH", 0), *rest, ("BACKGROUND", 0)]
    disk.close()


# A worker


def test_a_worker_does_what_is_urgent_between_the_tiles_of_a_job() -> None:
    """The background job stops after its first tile, for 99 times as long as that took. The thread does the other jobs
    meanwhile, in their order."""
    pace = LinkPace(0.01)
    worker = Worker("a test", CPU)
    order: list[str] = []
    first = threading.Event()
    go_on = threading.Event()

    def tile(index: int) -> None:
        order.append(f"tile {index} {current().name}")
        if index == 0:
            first.set()
            assert go_on.wait(60)
            pace.ask()

    parts = [partial(tile, index) for index in range(3)]
    background = worker.submit(*parts, place=2, pace=pace)
    assert first.wait(60)
    urgent = [worker.submit(partial(order.append, name), place=place) for name, place in (("b", 1), ("a", 0))]
    time.sleep(0.02)
    go_on.set()
    for work in urgent:
        work.wait()
    worker.submit(partial(order.append, "c"), place=1).wait()
    background.wait()
    assert order == ["tile 0 BACKGROUND", "a", "b", "c", "tile 1 BACKGROUND", "tile 2 BACKGROUND"]
    worker.stop()


def test_a_worker_that_stops_for_a_while_ends_at_once() -> None:
    pace = LinkPace(0.0001)
    worker = Worker("a test", CPU)
    done = threading.Event()

    def tile() -> None:
        time.sleep(0.02)
        pace.ask()
        done.set()

    worker.submit(tile, tile, pace=pace)  # it would go on after 200 s
    assert done.wait(60)
    begun = time.monotonic()
    worker.stop()
    assert time.monotonic() - begun < 60


# A store


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(store_module, "TILE_BYTES", 1 << 20)
    yield 1 << 20


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_urgent_reads_are_served_next_beside_a_background_write(tier: str, tiles: int, tmp_path: Path) -> None:
    """Each read is requested while a tile is being written, and is served before the next tile."""
    asked = (0, 7, 15)
    with zerostd.TierStore(budget={"disk_path": str(tmp_path), "background": 0.2}) as store:
        large = store.allocate("large", (NUM_TILES, tiles), torch.uint8, tier=tier)
        small = store.allocate("small", (4096,), torch.uint8, tier=tier)
        order: list[int | str] = []
        begun = threading.Semaphore(0)
        requested = threading.Semaphore(0)
        write = large.values.write
        read = small.values.read

        def writes(part: slice, values: torch.Tensor) -> None:
            number = part.start // tiles
            write(part, values)
            order.append(number)
            if number in asked:
                begun.release()
                assert requested.acquire(timeout=60)

        def reads(part: slice) -> torch.Tensor:
            order.append("read")
            return read(part)

        large.values.write = writes  # type: ignore[method-assign]
        small.values.read = reads  # type: ignore[method-assign,assignment]
        values = torch.randint(0, 255, (NUM_TILES, tiles), dtype=torch.uint8)
        transfer = large.write(values, priority="background")
        for _ in asked:
            assert begun.acquire(timeout=60)
            reading = small.read(priority="urgent")
            requested.release()
            reading.wait()
        transfer.wait()
        assert [order[place - 1] for place, entry in enumerate(order) if entry == "read"] == list(asked)
        assert [entry for entry in order if entry != "read"] == list(range(NUM_TILES))
        assert torch.equal(large.read().wait(), values)


def _tiles_beside_reads(tmp_path: Path, tiles: int, share: float | None, num_reads: int) -> int:
    """Return how many tiles of a background write are done after a number of reads, each of one tile."""
    budget = {"disk_path": str(tmp_path), "background": share}
    with zerostd.TierStore(budget=budget) as store:
        large = store.allocate("large", (400, tiles), torch.uint8, tier="disk")
        small = store.allocate("small", (tiles,), torch.uint8, tier="disk")
        written: list[slice] = []
        write = large.values.write

        def counted(part: slice, values: torch.Tensor) -> None:
            write(part, values)
            written.append(part)

        large.values.write = counted  # type: ignore[method-assign]
        transfer = large.write(torch.ones(400, tiles, dtype=torch.uint8), priority="background")
        for _ in range(num_reads):
            small.read(priority="urgent").wait()
        done = len(written)
        transfer.wait()
        assert len(written) == 400
    return done


def test_a_share_leaves_the_link_to_others(tiles: int, tmp_path: Path) -> None:
    """Tiles and reads of one size: without a share they take turns, with one the background gets fewer turns. When
    the reads end, it goes on at full speed, or the test would not end."""
    num_reads = 60
    without, with_share = (_tiles_beside_reads(tmp_path, tiles, share, num_reads) for share in (None, 0.05))
    assert without > num_reads // 2
    assert with_share < without // 2


def test_what_touches_one_tensor_keeps_its_order_while_background_work_stops(tiles: int, tmp_path: Path) -> None:
    """A read that must wait for a background write is not done before it, although the write stops between tiles."""
    with zerostd.TierStore(budget={"disk_path": str(tmp_path), "background": 0.05}) as store:
        rows = store.allocate("rows", (8, tiles), torch.uint8, tier="disk")
        other = store.allocate("other", (4096,), torch.uint8, tier="host")
        for value in range(1, 4):
            rows.write(torch.full((8, tiles), value, dtype=torch.uint8), priority="background")
            reading = rows.read(priority="urgent")
            while not reading.is_done():
                other.read(priority="urgent").wait()
            assert bool((reading.wait() == value).all())


# Checkpoints and averages of a model


def _model(folder: Path, share: float | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = zerostd.Placement(optimizer_states="disk")
    budget = {"disk_path": str(folder), "background": share}
    return zerostd.prepare(model, optimizer, placement=placement, budget=budget, groups=["*"])


def _train(model: nn.Module, optimizer: Any, num_steps: int) -> None:
    for step in range(num_steps):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("share", [None, 0.05])
def test_a_save_and_an_average_in_the_background_have_the_same_values(share: float | None, tmp_path: Path) -> None:
    model, optimizer = _model(tmp_path, share)
    average = zerostd.averaged(model, 0.5, tier="disk")
    _train(model, optimizer, 2)
    expected = zerostd.full_state_dict(model)
    pending = zerostd.save(tmp_path / "checkpoint", model, optimizer, wait=False)
    _train(model, optimizer, 4)
    pending.wait()
    averaged = zerostd.full_state_dict(average)
    zerostd.release(model)

    other, plain = _model(tmp_path, None)
    average = zerostd.averaged(other, 0.5, tier="disk")
    zerostd.load(tmp_path / "checkpoint", other, plain)
    state = zerostd.full_state_dict(other)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    _train(other, plain, 4)
    state = zerostd.full_state_dict(average)
    assert all(torch.equal(state[name], value) for name, value in averaged.items())
    zerostd.release(other)


def test_only_what_nobody_waits_for_is_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that a save reads from the disk, by the priority of their requests."""
    model, optimizer = _model(tmp_path, 0.5)
    _train(model, optimizer, 1)
    seen: list[Priority] = []
    start = writing.crc32

    def counted(values: torch.Tensor) -> int:
        seen.append(current())
        return start(values)

    monkeypatch.setattr(writing, "crc32", counted)
    zerostd.save(tmp_path / "waits", model, optimizer)
    assert seen and set(seen) == {Priority.PREFETCH}
    seen.clear()
    zerostd.save(tmp_path / "goes on", model, optimizer, wait=False).wait()
    assert seen and set(seen) == {Priority.BACKGROUND}
    zerostd.release(model)
