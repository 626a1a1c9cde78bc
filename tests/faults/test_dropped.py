"""A model that is dropped gives back its threads and files at once: the garbage collector need not run."""

from __future__ import annotations

import json
from pathlib import Path

from support import warm

CODE = """
import gc, json, os, sys, threading, time, warnings, weakref, torch, zerostd
from torch import nn
warnings.simplefilter("ignore")
torch.set_num_threads(1)
gc.disable()
PLACES = {
    "host": zerostd.Placement(optimizer_states="host", cpu_share=0.5),
    "disk": zerostd.Placement(parameters="disk", optimizer_states="disk", activations="disk"),
}

def counts():
    return [len(os.listdir("/proc/self/fd")), threading.active_count()]

def settled(wanted):
    deadline = time.monotonic() + 30
    while counts() != wanted and time.monotonic() < deadline:  # threads that were told to end
        time.sleep(0.01)
    return counts()

def prepared(place):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    budget = zerostd.Budget(disk_path=sys.argv[1])
    model, optimizer = zerostd.prepare(
        model, torch.optim.AdamW(model.parameters()), placement=PLACES[place], budget=budget, groups=["0", "2"]
    )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer

found = {}
prepared("host")  # torch imports more at the first step, and an error that it catches then keeps the frames of it
gc.collect()
settled([counts()[0], 1])
for place in PLACES:
    before = counts()
    for _ in range(3):
        model, optimizer = prepared(place)
        most = counts()
        del model, optimizer
    found[place] = {"before": before, "most": most, "after": settled(before)}

model, optimizer = prepared("disk")
last = model[2]
del model  # what is left of it goes on
with zerostd.gathered(last, write=True), torch.no_grad():
    last.weight.fill_(2.0)
found["part"] = [bool((last.weight == 2.0).all()), counts()[1] > before[1]]
del last, optimizer
found["no part"] = settled(before) == before
print(json.dumps(found))
"""


def test_dropped_models_hold_no_threads_and_files(tmp_path: Path) -> None:
    done = warm.run(CODE, tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for place in ("host", "disk"):
        assert results[place]["most"] > results[place]["before"] == results[place]["after"], results
    assert results["part"] == [True, True] and results["no part"], results
