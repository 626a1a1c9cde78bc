"""A trillion parameters on a cluster that is only described: what the planner predicts, written to docs/scale.md.

    python benchmarks/scale.py

Nothing is measured here. The cluster is clusters/1024x8.json, and `zerostd plan --cluster` takes it too.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zerostd.cli.printing import state_rows
from zerostd.engine.settings import Settings
from zerostd.measuring import load_profile
from zerostd.planning import MachineProfile, ModelProfile
from zerostd.planning.described import from_numbers
from zerostd.policy import Budget, Stage, Tier
from zerostd.preparing.scaling import ScalingRow, scaling, sent_bytes

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "benchmarks" / "clusters" / "1024x8.json"
PAGE = ROOT / "docs" / "scale.md"
WORLDS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEWER = (128, 1024, 8192)
HIDDEN, SEQUENCE, SAMPLES = 16384, 2048, 1
PAPER = ("7.5B", "128B", "1T")
DGX2 = ROOT / "src" / "zerostd" / "cli" / "clusters" / "dgx2-400.json"
AGAIN = frozenset({"recompute"})
FROM_TO = (64, 400)  # devices of the paper's figure about superlinear scaling


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


def page() -> str:
    """The whole text; the same every time."""
    machine = load_profile(CLUSTER)
    model = from_numbers("1T", hidden=HIDDEN, sequence=SEQUENCE, samples=SAMPLES)
    settings = Settings(accumulate=1)
    flat = scaling(model, machine, WORLDS, settings, ways=AGAIN)
    shared = scaling(model, together(machine), FEWER, settings, ways=AGAIN)
    parts = [
        head(model),
        assumptions(model, machine),
        volume(model, WORLDS[-1]),
        curves(machine, model, flat, shared),
        paper(),
        figure(),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def together(machine: MachineProfile) -> MachineProfile:
    """The same cluster, if what one adapter of a node brings is passed on to the others inside it."""
    inside, network = machine.wires
    rate = min(inside.bandwidth, network.bandwidth * machine.ranks_per_node)
    return replace(machine, wires=(inside, replace(network, bandwidth=rate)))


def told(*parts: str) -> list[str]:
    """One paragraph, in lines, and an empty one."""
    return [*textwrap.wrap(" ".join(parts), 120, break_long_words=False, break_on_hyphens=False), ""]


def head(model: ModelProfile) -> list[str]:
    worlds = ",".join(str(world) for world in WORLDS)
    return [
        "# A trillion parameters on 8,192 devices",
        "",
        *told(
            "**Predicted, not measured.** No run of this size was made. These are the planner's numbers for a cluster",
            "that is described as data. They come from the cost model that also plans for one machine. This command",
            "writes the page:",
        ),
        "```sh",
        "python benchmarks/scale.py",
        "```",
        "",
        "A test checks that the page is up to date. The rows of the first curve, and of any other model, come from",
        "",
        "```sh",
        f"zerostd plan --params 1T --hidden {HIDDEN} --sequence {SEQUENCE} --samples {SAMPLES} --recompute \\",
        f"  --accumulate 1 --cluster benchmarks/clusters/{CLUSTER.name} --scaling {worlds}",
        "```",
        "",
    ]


def assumptions(model: ModelProfile, machine: MachineProfile) -> list[str]:
    link, (inside, network), cores = machine.link, machine.wires, machine.processor
    assert link is not None
    block, rate = max(group.trained for group in model.groups), machine.matrix["bfloat16"]
    return [
        "## What is assumed",
        "",
        *told(
            f"The cluster is [{CLUSTER.name}](../benchmarks/clusters/{CLUSTER.name}), written by hand from round",
            "published numbers:",
        ),
        "| | |",
        "|---|---|",
        f"| nodes | {network.ranks // inside.ranks:,} of {machine.ranks_per_node} devices |",
        f"| device | {giga(machine.free['device'])}, {rate / 1e12:.0f} TFLOP/s in bf16; training reaches "
        f"{machine.achieved:.0%} of that |",
        f"| host link of a device | {giga(link.up)}/s each way, {giga(link.both)}/s both together |",
        f"| node | {machine.free['host'] / 1e12:.0f} TB of memory at {giga(cores.memory)}/s, {cores.num_cores} cores; "
        "no disk |",
        f"| inside a node ({inside.name}) | {giga(inside.bandwidth)}/s a rank, {inside.latency * 1e6:.0f} us a "
        "collective |",
        f"| between nodes ({network.name}) | {giga(network.bandwidth)}/s a rank (400 Gbit/s), "
        f"{network.latency * 1e6:.0f} us a collective |",
        "",
        *told(
            f"The model is a GPT of {model.numel / 1e12:.0f} T parameters: {len(model.groups) - 2} blocks of width",
            f"{HIDDEN:,}, each a group that gathers {2 * block / 1e9:.1f} GB. bf16 with fp32 masters, AdamW,",
            f"activations recomputed, no clipping. A pass of a rank is {SAMPLES} sequence of {SEQUENCE:,} tokens",
            "and a step is one pass, so the batch grows with the cluster. A tenth of every tier is left free.",
            "The devices are data parallel and nothing else: no tensor, pipeline or sequence parallelism.",
        ),
        *told(
            "The prediction leaves out congestion, stragglers and failures, latency that grows with the number of",
            "ranks, data loading and checkpoints. The collectives of a group run beside its own arithmetic, and the",
            "longer of the two counts.",
        ),
    ]


def volume(model: ModelProfile, size: int) -> list[str]:
    """Bytes over the wires, by stage."""
    tests = "[tests count bytes](../tests/accounting/test_wire.py)"
    lines = [
        "## What each rank sends in a step",
        "",
        f"By the closed form that {tests} against, on {size:,} ranks:",
        "",
        "| stage | parameters gathered | gradients reduced | in all |",
        "|--:|---|---|--:|",
    ]
    gathers = ("never: gradients are reduced to every rank", "once a step", "once a step", "in forward and in backward")
    for stage, text in zip(Stage, gathers, strict=True):
        lines.append(f"| {stage.value} | {text} | in backward | {sent_bytes(model, stage, size) / 1e12:.2f} TB |")
    return [*lines, "", "Stages 0 to 2 do not fit: 2 TB of parameters would have to be on every device.", ""]


def curves(
    machine: MachineProfile, model: ModelProfile, flat: Sequence[ScalingRow], shared: Sequence[ScalingRow]
) -> list[str]:
    (inside, network), ranks = machine.wires, machine.ranks_per_node
    sent = 2 * model.parameter_bytes + model.gradient_bytes
    flops = machine.matrix["bfloat16"] * machine.achieved
    tokens = sent / network.bandwidth * flops / 8  # of a parameter: 2 in forward, 2 again, 4 in backward
    lines = ["## The curve", ""]
    for row in flat:
        if row.refused:
            lines += told(f"{row.world_size:,} devices: {missing(row)}")
    return [
        *lines,
        *told(
            "**Each rank by itself.** A rank gathers everything through its own adapter, at",
            f"{giga(network.bandwidth)}/s. This is the cautious reading of the file:",
        ),
        *curve(flat),
        "",
        *told(
            f"**A node together.** Rings through all {ranks} adapters of a node bring every byte into it once and pass",
            f"it on inside, so that a rank sees {ranks} x {giga(network.bandwidth)}/s or the rate of {inside.name},",
            f"whichever is less: {giga(together(machine).wires[-1].bandwidth)}/s. This is the optimistic reading:",
        ),
        *curve(shared),
        "",
        *told(
            "Compute is the part of a step that the device's arithmetic takes. Efficiency is samples per second and",
            "device, relative to the smallest world that fits. It hardly falls, because a rank's bytes hardly grow.",
            "With each rank by itself, the wires are the limit. A pass of about",
            f"{tokens:,.0f} tokens would hide them, but the device has no room for that many while it holds the inputs",
            "of all blocks.",
        ),
    ]


def giga(value: float) -> str:
    return f"{value / 1e9:.0f} GB"


def missing(row: ScalingRow) -> str:
    """What the planner says that it would take, without single bytes."""
    found = re.search(r"at least (.*?) is missing", row.refused)
    return f"does not fit, {re.sub(r' [(][^)]*[)]', '', found.group(1))} is missing." if found else row.refused


def curve(rows: Sequence[ScalingRow]) -> list[str]:
    lines = [
        "| devices | stage | state, device | state, host | sent a step | step | compute | tokens/s | efficiency |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row.stage is None:
            continue
        held = [row.state.get(tier, 0) for tier in (Tier.DEVICE, Tier.HOST)]
        device, host = (f"{size / 1e9:.1f} GB" if size else "-" for size in held)
        lines.append(
            f"| {row.world_size:,} | {row.stage.value} | {device} | {host} | {row.sent / 1e12:.2f} TB | "
            f"{row.step_s:.1f} s | {row.compute_s / row.step_s:.0%} | {row.samples_per_s * SEQUENCE:,.0f} | "
            f"{row.efficiency:.1%} |"
        )
    return lines


def paper() -> list[str]:
    """Table 1."""
    lines = [
        "## Table 1 of the ZeRO paper",
        "",
        *told(
            "The table shows GB of model state on one device, counted as prepare counts them, with the digits of the",
            "paper. Stage 0 takes the first line on any number of devices. `zerostd plan --table --params 7.5B` prints",
            "it for any size.",
        ),
        "| devices |" + "".join(f" {size}, stage {stage} |" for size in PAPER for stage in (1, 2, 3)),
        "|--:|" + "--:|" * 9,
    ]
    models = [state_rows(from_numbers(size)) for size in PAPER]
    for rows in zip(*models, strict=True):
        cells = [row[f"stage_{stage}"] for row in rows for stage in (1, 2, 3)]
        lines.append(f"| {rows[0]['devices']} | " + " | ".join(cells) + " |")
    return lines


@functools.cache
def superlinear() -> list[ScalingRow]:
    """A GPT of 60 B without host memory; the samples of a pass are searched."""
    model = from_numbers("60B", hidden=8192, sequence=1024)
    settings = Settings(stage=Stage.PARAMETERS, accumulate=1, budget=Budget(host=0))
    return scaling(model, load_profile(DGX2), FROM_TO, settings, ways=AGAIN)


def figure() -> list[str]:
    """The paper's superlinear scaling."""
    few, many = superlinear()
    lines = [
        "",
        "## More than twice as fast on twice as many",
        "",
        *told(
            "The ZeRO paper trains 60 B parameters on 64 to 400 V100, and throughput grows faster than the number of",
            "devices. The reason is memory: more ranks leave more of each device to activations, so a pass has more",
            "samples, and the wires bring each parameter once for all of them. The planner finds the same, on 25 DGX-2",
            "without host memory, where the samples of a pass are searched for each number of devices:",
        ),
        "```sh",
        "zerostd plan --params 60B --hidden 8192 --recompute --stage 3 --accumulate 1 --cluster dgx2-400 \\",
        "  --budget host=0 --scaling 64,400",
        "```",
        "",
        "| devices | state, device | samples a pass | step | compute | tokens/s | TFLOP/s a device | efficiency |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in (few, many):
        lines.append(
            f"| {row.world_size} | {row.state[Tier.DEVICE] / 1e9:.1f} GB | {row.samples} | {row.step_s:.1f} s | "
            f"{row.compute_s / row.step_s:.0%} | {row.samples_per_s * 1024:,.0f} | {row.tflops:.1f} | "
            f"{row.efficiency:.0%} |"
        )
    return [
        *lines,
        "",
        *told(
            f"{many.world_size / few.world_size:.2f} times as many devices train",
            f"{many.samples_per_s / few.samples_per_s:.1f} times as many tokens a second. TFLOP/s are those of forward",
            "and backward, without what is recomputed. The paper reports 38 TFLOP/s a device, with tensor parallelism",
            "inside the nodes, which is not planned here.",
        )[:-1],
    ]


if __name__ == "__main__":
    main()
