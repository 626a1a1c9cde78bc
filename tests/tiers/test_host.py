"""Host memory: really there, really zero, really given back; and the transfers that others wait for."""

from __future__ import annotations

import gc
import os
import threading

import psutil
import pytest
import torch

from support.memory import pss
from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, Transfer, Work
from zerostd.tiers.host import Host

MIB = 2**20


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def host(ledger: Ledger) -> Host:
    return Host(torch.device("cpu"), ledger, num_threads=2)


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 3 * MIB + 5, 130 * MIB + 1])
def test_memory_is_zero_page_aligned_and_of_the_size_asked_for(host, num_bytes):
    tensor = host.allocate(num_bytes, Kind.PARAMETERS)
    assert tensor.shape == (num_bytes,) and tensor.dtype == torch.uint8 and tensor.device.type == "cpu"
    assert tensor.untyped_storage().data_ptr() % os.sysconf("SC_PAGESIZE") == 0
    assert not tensor.any()
    tensor.fill_(7)
    assert (tensor == 7).all()
    host.free(tensor)


def test_pages_come_and_go(host):
    host.free(host.allocate(MIB, Kind.PARAMETERS))  # what the first call itself takes
    gc.collect()
    before, num_bytes = pss(), 200 * MIB + 123
    tensor = host.allocate(num_bytes, Kind.OPTIMIZER_STATES)
    assert abs(pss() - before - num_bytes) < 0.02 * num_bytes
    host.free(tensor)
    assert abs(pss() - before) < 0.02 * num_bytes  # although `tensor` is still here


def test_views_that_outlive_free_are_harmless(host):
    tensor = host.allocate(MIB, Kind.BUFFERS)
    view = tensor.view(torch.float32)[100:200]
    view.fill_(3)
    host.free(view)  # a view will do
    del tensor
    gc.collect()
    assert not view.any()
    view.fill_(1)
    assert (view == 1).all()


def test_address_space_goes_with_the_last_view(host):
    def size() -> int:
        return psutil.Process().memory_info().vms

    tensor = host.allocate(256 * MIB, Kind.BUFFERS)
    mapped, view = size(), tensor[-1:]
    host.free(tensor)
    del tensor
    assert size() > mapped - 256 * MIB
    del view
    assert size() <= mapped - 256 * MIB


def test_memory_nobody_freed_goes_with_the_host(ledger):
    host = Host(torch.device("cpu"), ledger, 2)
    host.allocate(MIB, Kind.BUFFERS)
    before = pss()
    host.allocate(128 * MIB, Kind.BUFFERS)
    del host
    assert pss() - before < MIB


def test_ledger_knows(host, ledger):
    states = host.allocate(5000, Kind.OPTIMIZER_STATES)
    host.allocate(300, Kind.GRADIENTS)
    assert ledger.now[Tier.HOST, Kind.OPTIMIZER_STATES] == 5000
    host.free(states)
    assert ledger.now[Tier.HOST, Kind.OPTIMIZER_STATES] == 0
    assert ledger.now[Tier.HOST, Kind.GRADIENTS] == 300
    host.free_all()
    host.free_all()
    assert ledger.now[Tier.HOST, Kind.GRADIENTS] == 0
    assert ledger.peak[Tier.HOST, Kind.OPTIMIZER_STATES] == 5000


def test_more_than_there_is_is_refused_beforehand(host, ledger):
    wanted = 2 * psutil.virtual_memory().total
    before = pss()
    with pytest.raises(PrepareError, match=rf"optimizer_states needs .*{wanted} bytes.*\d+ bytes\) are free"):
        host.allocate(wanted, Kind.OPTIMIZER_STATES)
    assert pss() - before < 50 * MIB and not ledger.now


def test_misuse(host):
    tensor = host.allocate(100, Kind.BUFFERS)
    host.free(tensor)
    with pytest.raises(StorageError, match="already freed"):
        host.free(tensor)
    with pytest.raises(StorageError, match="not memory of this Host"):
        host.free(torch.zeros(3))
    with pytest.raises(StorageError, match="-1 bytes"):
        host.allocate(-1, Kind.BUFFERS)


@pytest.mark.gpu
def test_registered_memory_is_pinned_until_it_is_freed():
    host = Host(torch.device("cuda"), Ledger(), num_threads=2)
    tensor = host.allocate(100 * MIB + 1, Kind.BUFFERS)
    view = tensor[4096:]
    assert tensor.is_pinned() and view.is_pinned()
    tensor.fill_(5)
    copy = tensor.to("cuda", non_blocking=True)
    host.free(tensor)  # waits for the copy
    assert (copy == 5).all() and not view.is_pinned() and not view.any()
    again = [host.allocate(10 * MIB, Kind.BUFFERS) for _ in range(3)]
    del host, again, tensor, view  # nobody freed these: the addresses must be free for the next
    gc.collect()
    other = Host(torch.device("cuda"), Ledger(), num_threads=2)
    assert all(other.allocate(10 * MIB, Kind.BUFFERS).is_pinned() for _ in range(4))
    other.free_all()


def test_done_is_done():
    transfer: Transfer = Done()
    assert isinstance(transfer, Transfer) and transfer.is_done()
    transfer.wait()


def test_work_is_done_when_the_last_part_is():
    work = Work(3)
    work.finish()
    work.finish(ValueError("planted"))
    assert not work.is_done()
    thread = threading.Timer(0.05, work.finish)
    thread.start()
    for _ in range(3):
        with pytest.raises(StorageError, match="planted") as raised:
            work.wait()
        assert isinstance(raised.value.__cause__, ValueError) and work.is_done()
    thread.join()


def test_work_keeps_the_type_and_the_cause_of_our_own_errors():
    work, error, cause = Work(), PrepareError("what and why"), OSError(5, "input")
    error.__cause__ = cause
    work.finish(error)
    for _ in range(2):
        with pytest.raises(PrepareError, match="what and why") as raised:
            work.wait()
        assert raised.value.__cause__ is cause


def test_failure_that_nobody_waited_for_is_said():
    work = Work()
    work.finish(StorageError("planted"))
    with pytest.warns(RuntimeWarning, match="its result was not waited for: planted"):
        del work
