"""`zerostd plan`: what should rest where, for a module or for numbers, on this machine or on another."""

from __future__ import annotations

import contextlib
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zerostd import api
from zerostd.cli.measure import measured
from zerostd.cli.sources import SEQUENCE, Batch, Made, Source, budget_of, counts_of, ways_of
from zerostd.cli.tables import count_text, rows_json, scaling_table, show, state_rows, state_table, write
from zerostd.errors import PrepareError
from zerostd.measuring import load_profile
from zerostd.measuring.model import profile_model
from zerostd.planning import MachineProfile, ModelProfile, Plan
from zerostd.planning.cluster import NO_WIRES, TrainingOptions, plan_on, scaling
from zerostd.policy import Precision, Stage

__all__ = ["plan"]

WHAT, WHERE, HOW, SHOWN = "What", "Where", "How it is trained", "What is shown"


def _option(text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, metavar=metavar)


def _flag(name: str, text: str, panel: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


Function = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODULE:FUNCTION]",
        help="A function that returns a model, (model, optimizer) or (model, optimizer, batch).",
    ),
]
Meta = Annotated[bool, _flag("--meta", "Call the function under the meta device: nothing is allocated.", WHAT)]
Params = Annotated[list[str] | None, _option("A GPT of so many parameters: 350M, 7.5B, 1T.", WHAT, "SIZE")]
Hidden = Annotated[int | None, _option("Its width.", WHAT, "N")]
Layers = Annotated[int | None, _option("Its number of blocks.", WHAT, "N")]
Vocabulary = Annotated[int | None, _option("Rows of its embedding.", WHAT, "N")]
Config = Annotated[Path | None, _option("The model of a Hugging Face config.json.", WHAT, "FILE")]

Cluster = Annotated[Path | None, _option("Profile of another machine, as JSON. Default: this one.", WHERE, "FILE")]
World = Annotated[int | None, _option("Number of ranks. Default: those there are.", WHERE, "N")]
Limits = Annotated[str | None, _option("Most to use, such as device=24GiB,host=96GiB,disk=200GiB.", WHERE, "TIER=SIZE")]
DiskPath = Annotated[str | None, _option("The directory of a disk tier on this machine.", WHERE, "DIR")]

Chosen = Annotated[int | None, _option("0 to 3. Default: the one with the shortest step.", HOW, "STAGE")]
Samples = Annotated[int | None, _option("In one pass on one rank.", HOW, "N")]
Sequence = Annotated[int | None, _option("Tokens of a sample.", HOW, "N")]
Accumulate = Annotated[int | None, _option("Passes in a step.", HOW, "N")]
Clip = Annotated[bool, _flag("--clip", "Gradients are clipped to a norm.", HOW)]
Recompute = Annotated[bool, _flag("--recompute", "Blocks keep only their inputs for backward.", HOW)]
Ways = Annotated[
    str | None,
    _option(
        "What may be done with activations, of which the best is chosen: keep,recompute,host, or any.", HOW, "WAYS"
    ),
]
StepBatch = Annotated[
    int | None, _option("Samples of a step on one rank; how many go into a pass is searched, unless said.", HOW, "N")
]
Numbers = Annotated[str | None, _option("fp32, bf16 or fp16.", HOW, "NAME")]

Worlds = Annotated[str | None, _option("Many numbers of ranks side by side: 64,256,1024.", SHOWN, "N,N,...")]
StepSamples = Annotated[int | None, _option("With --scaling: samples of a step, all ranks together.", SHOWN, "N")]
Paper = Annotated[bool, _flag("--table", "Model state by stage and devices, as Table 1 of the ZeRO paper.", SHOWN)]
Json = Annotated[bool, _flag("--json", "Print JSON, and nothing else.", SHOWN)]
Output = Annotated[Path | None, _option("Save the plan there, for prepare(plan=...).", SHOWN, "FILE")]


@dataclass(frozen=True)
class _Job:
    """What is asked, checked."""

    source: Source
    batch: Batch
    precision: Precision
    use: TrainingOptions
    cluster: Path | None
    has_world: bool  # else those there are


@dataclass(frozen=True)
class _Shown:
    """What of it is shown, and how."""

    worlds: str | None
    step_samples: int | None
    is_table: bool
    as_json: bool
    output: Path | None

    def __post_init__(self) -> None:
        if self.is_table and self.worlds is not None:
            raise PrepareError("--table and --scaling are two things: ask for one")
        if self.step_samples is not None and (self.worlds is None or self.step_samples < 1):
            raise PrepareError(f"--step-samples {self.step_samples} goes with --scaling, and is 1 or more")


def plan(
    function: Function = None,
    meta: Meta = False,
    params: Params = None,
    hidden: Hidden = None,
    layers: Layers = None,
    vocabulary: Vocabulary = None,
    config: Config = None,
    cluster: Cluster = None,
    world: World = None,
    budget: Limits = None,
    disk_path: DiskPath = None,
    stage: Chosen = None,
    samples: Samples = None,
    sequence: Sequence = None,
    accumulate: Accumulate = None,
    batch: StepBatch = None,
    clip: Clip = False,
    recompute: Recompute = False,
    activations: Ways = None,
    precision: Numbers = None,
    scaling: Worlds = None,
    step_samples: StepSamples = None,
    table: Paper = False,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Plan what should rest where, and what a step will take."""
    source = Source(function, tuple(params or ()), hidden, layers, vocabulary, config, meta)
    taken, checked = Batch(samples, sequence, recompute, ways_of(activations), batch), Precision.parse(precision)
    source.check_batch(taken)
    chosen = None if stage is None else Stage.parse(stage)
    use = TrainingOptions(
        1 if world is None else world,
        chosen,
        accumulate,
        clip,
        checked.scales_loss,
        budget_of(budget, disk_path),
        taken.ways,
        batch,
    )
    job = _Job(source, taken, checked, use, cluster, world is not None)
    shown = _Shown(scaling, step_samples, table, as_json, output)
    if table:
        _show_table(job, shown)
    elif scaling is not None:
        _show_scaling(job, shown)
    else:
        _show_plan(job, shown)


def _show_plan(job: _Job, shown: _Shown) -> None:
    if job.source.function:
        title, made = _plan_module(job, job.source.make())
    else:
        model, machine = _only_model(job), _machine(job)
        with _status("planning"):
            made = plan_on(model, machine, job.use)
        title = f"{model.name}: {count_text(model.numel)} on {machine.name}"
    if shown.output is not None:
        write(shown.output, made.to_json())
    typer.echo(made.to_json() if shown.as_json else f"{title}\n\n{made.explain()}\n", nl=False)


def _plan_module(job: _Job, made: Made) -> tuple[str, Plan]:
    """By the front door: to the byte, as prepare would."""
    machine, use = None, job.use
    if job.cluster is not None:
        machine = _machine(job)
        if machine.disk is not None and use.budget.disk_path is None:
            use = replace(use, budget=replace(use.budget, disk_path=machine.disk.path))
    with _status("planning, and measuring this machine if that was not done yet" if machine is None else "planning"):
        found = api.plan(
            made.model,
            made.optimizer,
            budget=use.budget,
            batch=made.batch,
            world_size=use.world_size if job.has_world else None,
            machine=machine,
            stage=use.stage,
            precision=job.precision,
            accumulate=use.accumulate,
            max_grad_norm=1.0 if use.clips else None,  # that there is one matters, not which
        )
    numel = sum(parameter.numel() for parameter in made.model.parameters())
    where = "this machine" if machine is None else machine.name
    if found.world_size > 1 and found.predicted.step_s is not None and not (machine is not None and machine.wires):
        found = replace(found, notes=(*found.notes, NO_WIRES))
    return f"{type(made.model).__name__}: {count_text(numel)} on {where}", found


def _show_scaling(job: _Job, shown: _Shown) -> None:
    if shown.output is not None:
        raise PrepareError("--output saves one plan; for --scaling use --json and the shell's >")
    if job.use.batch is not None:
        raise PrepareError("--batch is of one rank; with --scaling say the samples of a step with --step-samples")
    worlds, sequence = counts_of(shown.worlds or ""), job.batch.sequence
    if job.source.function:
        made = job.source.make()
        model = profile_model(made.model, made.optimizer, precision=job.precision, batch=made.batch)
    else:
        model = _only_model(job)
        sequence = SEQUENCE if sequence is None and job.source.params else sequence
    machine = _machine(job)
    with _status("planning"):
        rows = scaling(model, machine, worlds, use=job.use, samples_per_step=shown.step_samples)
    if shown.as_json:
        typer.echo(rows_json(rows, sequence), nl=False)
        return
    title = f"{model.name}: {count_text(model.numel)} on {machine.name}; predicted, not measured"
    show(title, scaling_table(rows, sequence))
    for row in rows:
        if row.refused:
            typer.echo(f"{row.world_size:,} ranks: {row.refused}")


def _show_table(job: _Job, shown: _Shown) -> None:
    if job.source.function or shown.output is not None:
        raise PrepareError("--table goes with --params or --config, and with --json, nothing else")
    models = job.source.profiles(job.batch, job.precision)
    if shown.as_json:
        typer.echo(json.dumps({model.name: state_rows(model) for model in models}, indent=2))
    else:
        for model in models:
            show(f"{model.name}: GB of model state on one device, as in Table 1 of the ZeRO paper", state_table(model))


def _only_model(job: _Job) -> ModelProfile:
    models = job.source.profiles(job.batch, job.precision)
    if len(models) > 1:
        raise PrepareError("several --params go with --table only; plan one model at a time")
    return models[0]


def _machine(job: _Job) -> MachineProfile:
    """The cluster's, or this one."""
    if job.cluster is None:
        return measured(job.use.budget.disk_path)
    if job.use.budget.disk_path is not None:
        raise PrepareError(
            "--disk-path is of this machine, and --cluster is another: its profile says what disk it has"
        )
    return load_profile(job.cluster)


def _status(text: str) -> AbstractContextManager[object]:
    """A sign of life on a terminal."""
    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else contextlib.nullcontext()
