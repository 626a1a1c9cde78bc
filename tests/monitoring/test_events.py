"""Spans: free when nobody records, whole when somebody does, from any thread, and ranges of torch's profiler."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch

from zerostd.monitoring.events import HOST, NOTHING, Events, LoopPhase, LoopTimer, Timestamp


def recording() -> Events:
    events = Events()
    events.choose(7, is_on=True)
    return events


def test_nobody_records_nothing_is_made() -> None:
    events = Events()
    assert events.within("transfer", "up", "a", 3) is NOTHING and events.begin("gather", "wire", "a", 3) is None
    events.end(None)
    assert events.take() == []


def test_a_span_lasts_as_long_as_its_block() -> None:
    events, start = recording(), Timestamp.of_idle(HOST)
    with events.within("transfer", "up", "blocks.1", 96, way=("host", "device")):
        time.sleep(0.02)
    (span,) = events.take()
    assert (span.name, span.lane, span.group, span.num_bytes, span.way, span.step) == (
        *("transfer", "up", "blocks.1", 96, ("host", "device"), 7),
    )
    assert span.ended is not None and span.ended.has_passed()
    assert 0.02 <= span.ended.after(start) - span.begun.after(start) < 60
    assert span.begun.after(start) >= 0.0 and events.take() == []


def test_an_error_inside_ends_the_span_and_goes_on() -> None:
    events = recording()
    with pytest.raises(ValueError, match=r"^inside$"), events.within("update", "cpu"):
        raise ValueError("inside")
    (span,) = events.take()
    assert span.ended is not None


def test_many_threads_lose_none() -> None:
    events = recording()

    def work(number: int) -> None:
        for _ in range(500):
            with events.within("update", "cpu", str(number)):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(span.group for span in events.take()) == sorted(str(n) for n in range(8) for _ in range(500))


def test_the_profiler_sees_the_same_names() -> None:
    events = Events()  # not recording
    only = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only) as profile, events.within("update", "cpu", "blocks.3"):
        torch.ones(2).sum()
    assert "zerostd update blocks.3" in {one.key for one in profile.key_averages()}
    assert events.take() == []


def test_what_the_loop_does_is_one_span_after_the_other() -> None:
    events = recording()
    watch = LoopTimer(HOST, events)
    watch.mark(LoopPhase.FORWARD)
    watch.at("a")
    before = watch.mark(LoopPhase.WAITING, "updates")
    watch.mark(before)
    watch.at("b")
    watch.mark(LoopPhase.BACKWARD)
    watch.mark(LoopPhase.STEP)
    watch.mark(LoopPhase.OUTSIDE)
    spans = events.take()
    assert [(one.name, one.group, one.cause) for one in spans] == [
        ("forward", "", ""),
        ("forward", "a", ""),
        ("wait", "a", "updates"),
        ("forward", "a", ""),
        ("forward", "b", ""),
        ("backward", "", ""),
        ("step", "", ""),
    ]
    for one, other in pairwise(spans):
        assert one.ended is not None and other.begun.after(one.ended) >= 0.0


def test_what_a_recorded_step_asked_for_may_run_later() -> None:
    events = recording()
    events.choose(8, is_on=False)
    with events.within("update", "cpu", "late", step=7), events.within("update", "cpu", "other", step=6):
        assert events.begin("update", "cpu", "now", 0) is None
    assert [(span.group, span.step) for span in events.take()] == [("late", 7)]


def test_a_stamp_knows_what_came_first() -> None:
    first, second = Timestamp(HOST), Timestamp(HOST)
    assert second.after(first) >= 0.0 >= first.after(second)
