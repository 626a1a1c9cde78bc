"""The examples of a replay buffer in a store, and of a parameter server."""

from __future__ import annotations

import pytest

from support.scripts import run_script


def test_a_replay_buffer_on_disk_gives_back_what_was_written():
    (said,) = run_script("examples/replay.py")
    assert "yes: 4096 frames are as they were written" in said
    assert "disk {'tensors': 1, 'bytes': 16777216" in said


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_ten_workers_and_a_server_are_one_process_with_all_mini_batches(reduce):
    said = run_script("examples/parameter_server.py", "--reduce", reduce, ranks=11)
    assert f"yes: 10 workers and 1 server(s), the {reduce} of gradients" in said[0]
