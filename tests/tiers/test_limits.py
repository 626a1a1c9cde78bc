"""How much is free: cgroups of both versions, budgets, and what a refusal says."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import psutil
import pytest

from zerostd.errors import PrepareError
from zerostd.tiers import host, scratch_files
from zerostd.tiers.host import CgroupMemory, available_memory, cgroup_memory, check_host, free_host, memlock_limit
from zerostd.tiers.scratch_files import check_disk, free_disk

GIB = 2**30


def write_v2(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 1\nslab_reclaimable 2\n")


def write_v1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 9\ntotal_inactive_file {cached}\ntotal_active_file 0\n")


def member(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "membership").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "membership")


def test_v2_counts_page_cache_as_free(tmp_path):
    write_v2(tmp_path / "cg" / "job", str(8 * GIB), 6 * GIB, cached=2 * GIB)
    group = cgroup_memory(member(tmp_path, "0::/job"), str(tmp_path / "cg"))
    assert group == CgroupMemory(str(tmp_path / "cg" / "job"), 8 * GIB, 4 * GIB - 3)
    assert group.free == 4 * GIB + 3


def test_limit_of_an_ancestor_counts(tmp_path):
    write_v2(tmp_path / "cg" / "slice", str(4 * GIB), 3 * GIB)
    write_v2(tmp_path / "cg" / "slice" / "job", str(8 * GIB), 1 * GIB)
    group = cgroup_memory(member(tmp_path, "0::/slice/job"), str(tmp_path / "cg"))
    assert group is not None and group.limit == 4 * GIB


def test_v2_without_limit_is_none(tmp_path):
    write_v2(tmp_path / "cg" / "job", "max", 6 * GIB)
    assert cgroup_memory(member(tmp_path, "0::/job"), str(tmp_path / "cg")) is None


def test_v1_beside_an_empty_v2(tmp_path):
    write_v1(tmp_path / "cg" / "memory", 9223372036854771712, 7 * GIB)  # the number for "no limit"
    write_v1(tmp_path / "cg" / "memory" / "docker" / "x", 2 * GIB, GIB + 5, cached=5)
    lines = ("5:cpu,cpuacct:/", "4:memory:/docker/x", "0::/")
    group = cgroup_memory(member(tmp_path, *lines), str(tmp_path / "cg"))
    assert group is not None and (group.limit, group.free) == (2 * GIB, GIB)


def test_path_of_the_host_inside_a_container_ends_at_the_mount(tmp_path):
    write_v1(tmp_path / "cg" / "memory", 3 * GIB, GIB)
    group = cgroup_memory(member(tmp_path, "4:memory:/docker/not/here"), str(tmp_path / "cg"))
    assert group is not None and group.free == 2 * GIB


def test_use_over_the_limit_leaves_nothing(tmp_path):
    write_v2(tmp_path / "cg" / "job", str(GIB), 2 * GIB)
    group = cgroup_memory(member(tmp_path, "0::/job"), str(tmp_path / "cg"))
    assert group is not None and group.free == 0


def test_no_cgroups_at_all(tmp_path):
    assert cgroup_memory(str(tmp_path / "missing"), str(tmp_path)) is None
    assert cgroup_memory(member(tmp_path, "0::/job"), str(tmp_path / "missing")) is None


def test_free_host_is_the_smaller(tmp_path):
    assert free_host(5 * GIB, CgroupMemory("x", 4 * GIB, GIB)) == 3 * GIB
    assert free_host(2 * GIB, CgroupMemory("x", 4 * GIB, GIB)) == 2 * GIB
    assert 0 < free_host() <= psutil.virtual_memory().total


def test_available_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 3 kB\nMemAvailable:   70 kB\n")
    assert available_memory(str(tmp_path / "meminfo")) == 70 * 1024
    assert available_memory(str(tmp_path / "missing")) == pytest.approx(psutil.virtual_memory().total, rel=0.1)
    assert available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.1)


@pytest.mark.parametrize(("soft", "limit"), [(resource.RLIM_INFINITY, None), (65536, 65536), (0, 0)])
def test_memlock_is_the_soft_limit_or_none(soft, limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, 2**40) if kind == resource.RLIMIT_MEMLOCK else None)
    assert memlock_limit() == limit


def test_host_refusal_has_the_numbers():
    check_host(4096, "states")
    wanted = 1000 * psutil.virtual_memory().total
    with pytest.raises(PrepareError, match=rf"states needs .*\({wanted} bytes\).*\d+ bytes\) are free .*more ranks"):
        check_host(wanted, "states")


def test_all_that_is_free_may_be_used_and_no_byte_more(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "free_host", lambda *_: 10_000)
    monkeypatch.setattr(scratch_files, "free_disk", lambda _: 10_000)
    check_host(10_000, "states")
    check_disk(10_000, str(tmp_path))
    with pytest.raises(PrepareError, match=r"\(10000 bytes\) are free"):
        check_host(10_001, "states")
    with pytest.raises(PrepareError, match=r"\(10000 bytes\) free"):
        check_disk(10_001, str(tmp_path))


def test_host_budget_is_named_when_it_is_the_smaller():
    with pytest.raises(PrepareError, match=r"host budget leaves 0\.00 GiB \(8192 bytes\)"):
        check_host(8193, "states", limit=8192)
    check_host(8192, "states", limit=8192)
    with pytest.raises(PrepareError, match="system:"):
        check_host(2**60, "states", limit=2**59)


def test_disk_refusal_has_the_numbers(tmp_path):
    check_disk(4096, str(tmp_path))
    wanted = free_disk(str(tmp_path)) * 2
    with pytest.raises(PrepareError, match=rf"\({wanted} bytes\) wanted in {re.escape(str(tmp_path))}.*free"):
        check_disk(wanted, str(tmp_path))
    with pytest.raises(PrepareError, match=r"disk budget leaves 0\.00 GiB \(8192 bytes\)"):
        check_disk(8193, str(tmp_path), limit=8192)
