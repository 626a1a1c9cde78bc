"""What goes wrong with a checkpoint has a name, changes nothing and leaves nothing; training and saving go on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostd
from checkpoints.runs import Job, Run, compared, unlike
from support import warm
from support.agreement import agree
from support.processes import doing
from zerostd import CheckpointError
from zerostd.checkpointing.storage import safetensors_files
from zerostd.checkpointing.storage.manifest import BLOCK, seal

pytestmark = pytest.mark.timeout(90)  # some of these could hang

JOB = Job(precision="bf16", placement="host")
STEPS = 2  # before the fault, and after
SHARD = "rank-00000-of-00001.safetensors"
OLD = "step-1.incomplete-0123456789ab"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = Run(JOB, tmp_path_factory.mktemp("disk"))
    run.train(STEPS)
    losses = run.train(STEPS)
    return {"losses": losses, "tensors": run.tensors(), "facts": run.facts()}


@pytest.fixture
def trained(tmp_path_factory: pytest.TempPathFactory, undisturbed: dict[str, Any]) -> Iterator[Run]:
    """A run in the middle. Whatever a test does to it, it goes on as if it had not."""
    run = Run(JOB, tmp_path_factory.mktemp("disk"))
    run.train(STEPS)
    yield run
    assert run.train(STEPS) == undisturbed["losses"]
    assert not compared(run.tensors(), undisturbed["tensors"])
    assert not unlike(run.facts(), undisturbed["facts"])


def refused(run: Run, path: Path, words: str) -> str:
    """load raises and changes nothing."""
    before, facts = run.tensors(), run.facts()
    with pytest.raises(CheckpointError, match=words) as caught:
        run.load(path)
    assert "Nothing was changed" in str(caught.value)
    assert not compared(run.tensors(), before) and not unlike(run.facts(), facts)
    return str(caught.value)


def fails_to_save(run: Run, folder: Path, words: str) -> None:
    """save raises and leaves nothing."""
    names = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError, match=words):
        run.save(folder / "saved")
    assert sorted(os.listdir(folder)) == names


def works(run: Run, folder: Path) -> None:
    """save and load do what they should, also after what happened."""
    before, facts = run.tensors(), run.facts()
    run.save(folder / "good")
    other = Run(JOB, run.folder, seed=5)
    other.load(folder / "good")
    assert not compared(other.tensors(), before) and not unlike(other.facts(), facts)
    run.load(folder / "good")  # so that the generators are where they were


# -- saving --


class SmallDisk:
    """A file system of a few pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=8m", "tmpfs")

    def resize(self, options: str) -> None:
        self._mount("-o", f"remount,{options}")

    def _mount(self, *arguments: str) -> None:
        try:
            subprocess.run(["mount", *arguments, str(self.path)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no small file system: mount says {getattr(error, 'stderr', None) or error}")

    def fill(self, *, leave: int) -> None:
        """So many pages are free then."""
        free = os.statvfs(self.path).f_bavail
        (self.path / "filler").write_bytes(bytes(4096 * (free - leave)))
        assert os.statvfs(self.path).f_bavail == leave

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small")
    yield disk
    disk.close()


@pytest.mark.parametrize("pages", [0, 1, 5])
def test_a_full_disk(pages: int, trained: Run, small_disk: SmallDisk) -> None:
    small_disk.fill(leave=pages)
    fails_to_save(trained, small_disk.path, "ENOSPC")
    (small_disk.path / "filler").unlink()
    works(trained, small_disk.path)


def test_a_disk_that_is_full_before_the_manifest(trained: Run, small_disk: SmallDisk) -> None:
    trained.save(small_disk.path / "first")
    pages = -(-(small_disk.path / "first" / SHARD).stat().st_size // 4096)
    small_disk.fill(leave=pages)
    fails_to_save(trained, small_disk.path, r"manifest\.json.*ENOSPC|ENOSPC.*manifest\.json")
    assert zerostd.latest(small_disk.path) == str(small_disk.path / "first")
    (small_disk.path / "filler").unlink()
    works(trained, small_disk.path)


def test_checkpoints_that_keep_would_remove_make_room_for_the_next_one(trained: Run, small_disk: SmallDisk) -> None:
    """The disk has room for two, and keep=2 says that there should never be more."""
    names = [f"step-{number}" for number in range(4)]
    for name in names[:2]:
        trained.save(small_disk.path / name)
    pages = sum(-(-file.stat().st_size // 4096) for file in (small_disk.path / names[0]).iterdir())
    small_disk.fill(leave=pages // 2)
    with pytest.raises(CheckpointError, match="ENOSPC"):
        trained.save(small_disk.path / names[2])
    for last, name in enumerate(names[2:], 2):
        trained.save(small_disk.path / name, keep=2)
        there = sorted(path.name for path in small_disk.path.iterdir() if path.is_dir())
        assert there == names[last - 1 : last + 1]
        trained.load(small_disk.path / name)
    assert zerostd.memory(trained.model).retries["reserving: ENOSPC"] >= 2


def test_a_directory_that_cannot_be_written(trained: Run, small_disk: SmallDisk) -> None:
    small_disk.resize("ro")
    fails_to_save(trained, small_disk.path, "EROFS")
    small_disk.resize("rw")
    works(trained, small_disk.path)


def test_a_directory_of_somebody_else(trained: Run, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    fails_to_save(trained, tmp_path, "EACCES")
    tmp_path.chmod(0o700)
    works(trained, tmp_path)


def test_a_file_where_a_directory_should_be(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"EEXIST|ENOTDIR"):
        trained.save(tmp_path / "file" / "saved")
    fails_to_save(trained, tmp_path, "already exists") if (tmp_path / "file").rename(tmp_path / "saved") else None
    (tmp_path / "saved").unlink()
    works(trained, tmp_path)


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """The system's own limit, in a process of its own."""
    code = """
    import os, resource, sys
    import zerostd
    from checkpoints.runs import Job, Run, compared
    folder = sys.argv[1]
    run = Run(Job(placement="host"), folder)
    run.train(2)
    before = run.tensors()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        run.save(folder + "/saved")
    except zerostd.CheckpointError as error:
        print("EFBIG" in str(error), os.listdir(folder), compared(run.tensors(), before))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    run.save(folder + "/saved")
    print(os.listdir(folder))
    """
    done = warm.run(textwrap.dedent(code), tmp_path)
    assert done.stdout == "True [] []\n['saved']\n", done.stderr


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "rename", "mkdir", "flock"])
def test_any_call_of_the_system_fails(call: str, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fcntl if call == "flock" else os
    true, left = getattr(module, call), 100

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(errno.ENXIO, "planted")  # which is not tried again
        return true(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_files, "START_EVERY", 1)
        patched.setattr(module, call, failing)
        trained.save(tmp_path / "whole")
        times = 100 - left
        assert times > 0, f"{call} is not called"
        for number in range(1, times + 1):
            shutil.rmtree(tmp_path / "whole", ignore_errors=True)
            left = number
            try:
                trained.save(tmp_path / "whole")
            except CheckpointError as error:
                assert "ENXIO" in str(error), error
                # what was complete before the error stays: only the last sync, of the directory beside, comes later
                is_last = call in ("fsync", "open") and number == times
                assert os.listdir(tmp_path) == (["whole"] if is_last else []), f"{call} number {number}"
            else:  # the directory above is there, whatever mkdir says of it
                assert (call, number) == ("mkdir", 1), f"{call} number {number} failed, and nobody noticed"
    shutil.rmtree(tmp_path / "whole", ignore_errors=True)
    works(trained, tmp_path)


def test_after_a_full_disk_no_more_blocks_are_written(
    tmp_path: Path, trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.pwrite
    begun: list[int] = []  # offsets of the large writes, each a block or the first slice of one
    counting = threading.Lock()

    def full(fd: int, values: Any, offset: int) -> int:
        if len(values) < 1 << 16:
            return true(fd, values, offset)
        with counting:
            begun.append(offset)
            is_first = len(begun) == 1
        if not is_first:
            time.sleep(0.5)  # so that later blocks are waiting when the error comes
        raise OSError(errno.ENOSPC, "planted")

    extra = torch.zeros(8 * safetensors_files.NUM_THREADS * BLOCK, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=rf"{SHARD} cannot be written: ENOSPC: planted"):
            zerostd.save(tmp_path / "saved", trained.model, trained.optimizer, extra)
    assert 1 <= len(set(begun)) <= safetensors_files.NUM_THREADS  # each is tried again a few times
    assert not os.listdir(tmp_path)
    works(trained, tmp_path)


def full_on_two(rank: int, folder: str, path: str) -> list[str]:
    """A disk that is too small for both ranks: an error on both, nothing left, and training goes on the same."""
    found = []
    for fails in (False, True):
        run = Run(JOB, folder, rank=rank)
        run.train(STEPS)
        wrong = []
        if fails:
            doing("saving to a full disk")
            try:
                run.save(f"{path}/saved")
                wrong = ["it was saved"]
            except CheckpointError as error:
                wrong = [] if "ENOSPC" in str(error) and "rank " in str(error) else [str(error)]
            dist.barrier()
            wrong += [f"{name} is left" for name in os.listdir(path) if name != "filler"]
        found.append((run.train(STEPS), run.tensors(), run.facts()))
    (losses, tensors, facts), (others, more, said) = found
    wrong += compared(more, tensors) + unlike(said, facts) + ([] if losses == others else ["losses differ"])
    return [f"rank {rank}: {text}" for text in wrong]


def test_a_full_disk_on_two_ranks(ranks: Any, small_disk: SmallDisk, tmp_path: Path) -> None:
    small_disk.fill(leave=4)
    agree(ranks(2, full_on_two, str(tmp_path), str(small_disk.path)))


# -- what others left, and what others are writing --


def make_old(folder: Path) -> None:
    os.utime(folder, (1, 1))


def test_what_a_killed_run_left_goes(trained: Run, tmp_path: Path) -> None:
    trained.save(tmp_path / "step-0")
    for act in (lambda: trained.save(tmp_path / "step-2"), lambda: trained.load(tmp_path / "step-2")):
        (tmp_path / OLD).mkdir()
        (tmp_path / OLD / SHARD).write_bytes(b"half")
        make_old(tmp_path / OLD)
        act()
        assert sorted(os.listdir(tmp_path)) == ["step-0", "step-2"]


def test_what_a_living_run_writes_stays(trained: Run, tmp_path: Path) -> None:
    (tmp_path / OLD).mkdir()
    make_old(tmp_path / OLD)
    fd = os.open(tmp_path / OLD, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        trained.save(tmp_path / "step-2")
        assert sorted(os.listdir(tmp_path)) == [OLD, "step-2"]
    finally:
        os.close(fd)
    os.utime(tmp_path / OLD, (time.time() + 60, time.time() + 60))  # made this moment, and not locked yet
    trained.save(tmp_path / "step-3")
    assert sorted(os.listdir(tmp_path)) == [OLD, "step-2", "step-3"]
    make_old(tmp_path / OLD)
    trained.load(tmp_path / "step-3")
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_only_our_own_leftovers_go(trained: Run, tmp_path: Path) -> None:
    for name in ("data.incomplete-2020", ".incomplete-0123456789ab", "x.incomplete-0123456789AB"):
        (tmp_path / name).mkdir()
        make_old(tmp_path / name)
    (tmp_path / OLD).touch()
    (tmp_path / "aside").mkdir()
    make_old(tmp_path / "aside")
    (tmp_path / OLD.replace("1", "2")).symlink_to(tmp_path / "aside")
    names = sorted(os.listdir(tmp_path))
    trained.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "saved"])


# -- loading: files --


@pytest.fixture
def saved(trained: Run, tmp_path: Path) -> Path:
    trained.save(tmp_path / "saved")
    return tmp_path / "saved"


def manifest_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return data


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = manifest_of(folder)
    del data["crc32"]
    change(data)
    (folder / "manifest.json").write_text(seal(data))


def begin_of(folder: Path) -> int:
    """Where the numbers of a shard begin."""
    with open(folder / SHARD, "rb") as file:
        return 8 + int(struct.unpack("<Q", file.read(8))[0])


def header_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / SHARD).read_bytes()[8 : begin_of(folder)])
    return data


def write_header(folder: Path, data: Any, *, length: int | None = None) -> None:
    """Another header in front of the same numbers; the manifest knows of the file's new length."""
    numbers = (folder / SHARD).read_bytes()[begin_of(folder) :]
    text = json.dumps(data).encode()
    (folder / SHARD).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + numbers)
    size = (folder / SHARD).stat().st_size
    edit(folder, lambda data: data["files"].update({SHARD: {"bytes": size}}))


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_truncated_shard(trained: Run, saved: Path) -> None:
    size = (saved / SHARD).stat().st_size
    for length in (size - 1, size // 2, 7, 0):
        os.truncate(saved / SHARD, length)
        refused(trained, saved, f"{SHARD} has {length} bytes and should have {size}: it is incomplete")
        assert zerostd.latest(saved.parent) is None


def test_a_shard_that_is_too_long(trained: Run, saved: Path) -> None:
    with open(saved / SHARD, "ab") as file:
        file.write(b"more")
    refused(trained, saved, "should have")
    edit(saved, lambda data: data["files"].update({SHARD: {"bytes": (saved / SHARD).stat().st_size}}))
    refused(trained, saved, "4 bytes follow the last tensor")


def test_a_missing_shard(trained: Run, saved: Path) -> None:
    (saved / SHARD).unlink()
    refused(trained, saved, f"{SHARD}, a file of the checkpoint, cannot be read: ENOENT")
    edit(saved, lambda data: data.update(files={}))
    refused(trained, saved, "not among the files")


def test_files_that_the_manifest_does_not_name_are_left_alone(trained: Run, saved: Path, tmp_path: Path) -> None:
    """A note, another rank's file, a directory, a pipe: nobody opens them."""
    (saved / "notes.txt").write_text("the good one")
    (saved / "rank-00001-of-00002.safetensors").write_bytes(b"damaged")
    (saved / "folder").mkdir()
    os.mkfifo(saved / "model.safetensors")
    names = sorted(os.listdir(saved))
    assert zerostd.latest(tmp_path) == str(saved)
    trained.load(saved)
    zerostd.merge(saved, tmp_path / "merged")
    assert sorted(os.listdir(saved)) == names


@pytest.mark.parametrize("kind", ["parameter", "state", "buffer", "random", "extra"])
def test_a_flipped_bit(kind: str, trained: Run, tmp_path: Path) -> None:
    zerostd.save(tmp_path / "saved", trained.model, trained.optimizer, {"x": torch.arange(100)})
    saved = tmp_path / "saved"
    header, begin = header_of(saved), begin_of(saved)
    found = [one for one in manifest_of(saved)["tensors"] if one["kind"] == kind]
    assert found
    for one in (found[0], found[-1]):
        low, high = header[one["parts"][0]["key"]]["data_offsets"]
        for place in (low, high - 1):
            flip(saved / SHARD, begin + place)
            said = refused(trained, saved, f"{SHARD} is damaged: elements .* do not match their checksum")
            assert one["of"] in said
            flip(saved / SHARD, begin + place)
    zerostd.load(saved, trained.model, trained.optimizer)


def test_a_flipped_bit_in_the_second_block(tmp_path: Path) -> None:
    run = Run(Job(rules="sgd"), tmp_path)
    extra = torch.zeros(2 * BLOCK + 9, dtype=torch.uint8)
    zerostd.save(tmp_path / "saved", run.model, run.optimizer, extra)
    saved = tmp_path / "saved"
    (entry,) = [one for one in manifest_of(saved)["tensors"] if one["kind"] == "extra"]
    assert len(entry["parts"][0]["crc32"]) == 3
    low, high = header_of(saved)[entry["parts"][0]["key"]]["data_offsets"]
    flip(saved / SHARD, begin_of(saved) + low + BLOCK + 5)
    refused(run, saved, f"elements {BLOCK} to {2 * BLOCK} of extra '0' do not match their checksum")
    flip(saved / SHARD, begin_of(saved) + low + BLOCK + 5)
    flip(saved / SHARD, begin_of(saved) + high - 1)
    refused(run, saved, f"elements {2 * BLOCK} to {2 * BLOCK + 9} of extra '0' do not match their checksum")


def no_shard(saved: Path) -> None:
    (saved / SHARD).unlink()


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (lambda saved: (no_shard(saved), os.mkfifo(saved / SHARD)), "not an ordinary file"),
    "a directory": (lambda saved: (no_shard(saved), (saved / SHARD).mkdir()), "not an ordinary file"),
    "a device": (lambda saved: (no_shard(saved), (saved / SHARD).symlink_to("/dev/zero")), "not an ordinary file"),
    "no manifest": (lambda saved: (saved / "manifest.json").unlink(), "has no manifest.json"),
    "a manifest that is a directory": (
        lambda saved: ((saved / "manifest.json").unlink(), (saved / "manifest.json").mkdir()),
        "not an ordinary file",
    ),
    "a manifest that is a pipe": (
        lambda saved: ((saved / "manifest.json").unlink(), os.mkfifo(saved / "manifest.json")),
        "not an ordinary file",
    ),
    "a manifest without end": (
        lambda saved: ((saved / "manifest.json").unlink(), (saved / "manifest.json").symlink_to("/dev/zero")),
        "not an ordinary file",
    ),
    "a huge manifest": (lambda saved: os.truncate(saved / "manifest.json", 1 << 40), "it is not a manifest"),
    "half a manifest": (lambda saved: os.truncate(saved / "manifest.json", 1000), "not a checkpoint's manifest"),
    "an empty manifest": (lambda saved: os.truncate(saved / "manifest.json", 0), "not a checkpoint's manifest"),
    "no checkpoint": (lambda saved: shutil.rmtree(saved), "is not a directory"),
    "a file": (lambda saved: (shutil.rmtree(saved), saved.touch()), "an ordinary model without optimizer states"),
    "no safetensors": (lambda saved: (saved / SHARD).write_bytes(bytes(size_of(saved))), "is not a safetensors file"),
}


def size_of(saved: Path) -> int:
    return (saved / SHARD).stat().st_size


@pytest.mark.parametrize("name", STRANGE)
def test_files_that_are_something_else(name: str, trained: Run, saved: Path) -> None:
    change, words = STRANGE[name]
    change(saved)
    refused(trained, saved, words)
    assert zerostd.latest(saved.parent) is None or name == "no safetensors"


# -- loading: what the manifest and the headers say --


def first(data: dict[str, Any], kind: str = "parameter") -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in data["tensors"] if one["kind"] == kind)
    return found


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["files"] = {name: data["files"][SHARD]}
        for one in data["tensors"]:
            for part in one["parts"]:
                part["file"] = name

    return change


def without(kind: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["tensors"].remove(first(data, kind))


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda d: d.update(version=99), "version 99, but this zerostd reads up to 3; use a newer zerostd"),
    "path up": (rename_file("../other.safetensors"), r"'\.\./other\.safetensors' is not a plain file name"),
    "absolute path": (rename_file("/etc/passwd.safetensors"), "'/etc/passwd.safetensors' is not a plain file name"),
    "huge length": (lambda d: d["files"].update({SHARD: {"bytes": 1 << 61}}), "should have 2305843009213693952"),
    "huge shape": (lambda d: first(d).update(shape=[1 << 61]), "has 2305843009213693952 elements"),
    "huge part": (lambda d: first(d)["parts"][0].update(stop=1 << 59), "checksums in a part"),
    "negative": (lambda d: first(d)["parts"][0].update(start=-4), "start is -4: Expected `int` >= 0"),
    "overlap": (lambda d: first(d)["parts"].insert(0, {**first(d)["parts"][0], "key": "x"}), "parts that overlap"),
    "gap": (lambda d: first(d)["parts"][0].update(start=1), "a gap at 0"),
    "one place twice": (lambda d: first(d)["parts"][0].update(key=first(d, "state")["parts"][0]["key"]), "two parts"),
    "unknown key": (lambda d: first(d)["parts"][0].update(key="12345"), "has no '12345'"),
    "another dtype": (lambda d: first(d).update(dtype="int32"), "is .* of torch.float32, but the manifest says"),
    "another parameter": (lambda d: first(d).update(of="other", names=[]), "not that of its parameter|not in the"),
    "a parameter less": (without("parameter"), "is not in the manifest|not that of its parameter"),
    "a state less": (without("state"), "is not in the manifest"),
    "a buffer less": (without("buffer"), "is not in the manifest"),
    "another checksum": (lambda d: first(d)["parts"][0].update(crc32=[0]), "is damaged"),
    "another optimizer": (lambda d: d["optimizer"].update({"class": "SGD"}), "its optimizer is 'SGD'"),
    "another group": (lambda d: d["optimizer"]["groups"][0]["parameters"].pop(), "its param_groups have"),
    "strange option": (
        lambda d: d["optimizer"]["groups"][0]["options"].update(lr={"$object": "os.system"}),
        r"'\$object' in the checkpoint is unknown",
    ),
    "options that are none": (
        lambda d: d["optimizer"]["groups"][0].update(options={"$tuple": [1]}),
        "invalid options or scalar states",
    ),
    "hidden parameters": (
        lambda d: d["optimizer"]["groups"][0].update(options={"$items": [["params", []]]}),
        "invalid options or scalar states",
    ),
    "tensor among states": (
        lambda d: d["optimizer"]["singles"].update(x={"step": {"$tensor": 0}}),
        "which cannot hold tensors",
    ),
    "generator": (lambda d: d["random"]["0"].update(python=[3, [1, 2], None]), "invalid RNG state"),
    "another generator": (
        lambda d: d["random"]["0"].update(numpy={"$tuple": ["MT19937"]}),
        "invalid RNG state",
    ),
    "extra": (lambda d: d.update(extra={"$tensor": 7}), "no tensor 7 in extra"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_lies(name: str, trained: Run, saved: Path) -> None:
    change, words = HOSTILE[name]
    outside = saved.parent / "other.safetensors"
    shutil.copy(saved / SHARD, outside)
    edit(saved, change)
    refused(trained, saved, words)
    outside.unlink()


@pytest.mark.parametrize("depth", [300, 600, 900, 100_000])
def test_a_manifest_that_is_deep(depth: int, trained: Run, saved: Path) -> None:
    data = {**manifest_of(saved), "version": 1, "extra": "here"}
    del data["crc32"]
    (saved / "manifest.json").write_text(json.dumps(data).replace('"here"', "[" * depth + "]" * depth))
    before = trained.tensors()
    try:
        zerostd.load(saved, trained.model, trained.optimizer)
        assert depth < 1000
    except CheckpointError as error:
        assert "Nothing was changed" in str(error)
    assert not compared(trained.tensors(), before)


def replace(data: dict[str, Any], key: str, **fields: Any) -> dict[str, Any]:
    data[key].update(fields)
    return data


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no dict": (lambda h: [h], "damaged header"),
    "dtype": (lambda h: replace(h, "0", dtype="F33"), "damaged header: '0' has the unknown dtype 'F33'"),
    "negative": (lambda h: replace(h, "0", data_offsets=[-4, h["0"]["data_offsets"][1] - 4]), "damaged header"),
    "beyond the end": (lambda h: replace(h, "0", data_offsets=[1 << 40, (1 << 40) + 4]), "damaged header"),
    "huge shape": (lambda h: replace(h, "0", shape=[1 << 61, 1 << 61]), "damaged header"),
    "overlap": (lambda h: replace(h, "1", data_offsets=h["0"]["data_offsets"], shape=h["0"]["shape"]), "overlap"),
    "another name": (lambda h: {("x" if key == "0" else key): value for key, value in h.items()}, "has no '0'"),
    "one less": (lambda h: {key: value for key, value in h.items() if key != "0"}, "a gap at"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(name: str, trained: Run, saved: Path) -> None:
    change, words = HEADERS[name]
    write_header(saved, change(header_of(saved)))
    refused(trained, saved, words)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_of_another_length(length: int, trained: Run, saved: Path) -> None:
    write_header(saved, header_of(saved), length=length)
    refused(trained, saved, "is not a safetensors file|damaged header")


def test_a_changed_option_is_taken_as_it_is(trained: Run, saved: Path) -> None:
    """A manifest is text: who changes the learning rate by hand gets what they wrote."""
    edit(saved, lambda data: data["optimizer"]["groups"][0]["options"].update(lr=0.125))
    rate = trained.optimizer.param_groups[0]["lr"]
    zerostd.load(saved, trained.model, trained.optimizer)
    assert trained.optimizer.param_groups[0]["lr"] == 0.125
    trained.optimizer.param_groups[0]["lr"] = rate


# -- loading on several ranks --


def damaged_on_two(rank: int, folder: str) -> list[str]:
    """What only rank 1 reads is damaged: both ranks hear of it, and neither has changed."""
    run, wrong = Run(JOB, folder, rank=rank), []
    run.train(STEPS)
    saved = Path(folder, "saved")
    run.save(saved)
    file = "rank-00001-of-00002.safetensors"
    other = Run(JOB, folder, rank=rank, seed=5)
    other.train(1)
    before, facts = other.tensors(), other.facts()
    size = (saved / file).stat().st_size
    acts: dict[str, tuple[Callable[[Path], object], str]] = {
        "bit": (lambda path: flip(path, size - 6000), "rank 1: .*is damaged"),
        "length": (lambda path: os.truncate(path, 100), "has 100 bytes"),
        "missing": (lambda path: path.unlink(), "ENOENT"),
    }
    for damage, (act, words) in acts.items():
        doing(damage)
        dist.barrier()
        if rank == 0:
            shutil.copytree(saved, Path(folder, damage))
            act(Path(folder, damage, file))
        dist.barrier()
        try:
            other.load(Path(folder, damage))
            wrong.append(f"{damage} was loaded")
        except CheckpointError as error:
            if file not in str(error) or not re.search(words, str(error)):
                wrong.append(f"{damage}: {error}")
        wrong += [f"{damage}: {text}" for text in compared(other.tensors(), before) + unlike(other.facts(), facts)]
    other.load(saved)
    wrong += compared(other.tensors(), run.tensors()) + unlike(other.facts(), run.facts())
    return [f"rank {rank}: {text}" for text in wrong]


def test_damage_that_one_rank_finds_stops_all(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, damaged_on_two, str(tmp_path)))


def breaks_off(rank: int, folder: str) -> list[str]:
    """The disk of rank 1 fails in the second reading, after everything was found in order."""
    run, wrong = Run(JOB, folder, rank=rank), []
    run.train(STEPS)
    saved = Path(folder, "saved")
    run.save(saved)
    other = Run(JOB, folder, rank=rank, seed=5)
    true, count, last = os.preadv, 0, 1 << 30
    counting = threading.Lock()  # blocks are read in several threads

    def failing(*arguments: Any) -> int:
        nonlocal count
        with counting:
            count += 1
            if count >= last:
                raise OSError(errno.EIO, "planted")
        return true(*arguments)

    os.preadv = failing
    try:
        other.load(saved)
        before, whole = count, (other.tensors(), other.facts())
        for number in (before, before - 10):
            doing(f"a fault in read {number} of {before}")
            count, last = 0, number if rank == 1 else last
            begun = time.monotonic()
            try:
                other.load(saved)
                wrong.append("it was loaded")
            except CheckpointError as error:
                words = r"rank 1: .*rank-0000\d-of-00002.safetensors cannot be read at \d+: EIO: planted\. .*partly"
                wrong += [] if re.search(words, str(error)) else [str(error)]
            wrong += [] if time.monotonic() - begun < 20 else [f"heard of it after {time.monotonic() - begun:.0f} s"]
            last = 1 << 30
            other.load(saved)
            wrong += compared(other.tensors(), whole[0]) + unlike(other.facts(), whole[1])
    finally:
        os.preadv = true
    losses = other.train(STEPS)
    run.load(saved)  # and the generators, which both share
    wrong += [] if run.train(STEPS) == losses else ["it goes on otherwise"]
    return [f"rank {rank}: {text}" for text in wrong]


def test_a_disk_that_fails_in_the_second_reading_stops_all(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, breaks_off, str(tmp_path)))
