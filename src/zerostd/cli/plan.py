"""`zerostd plan`: where model state is kept, for a module or for numbers, on this machine or on another."""

from __future__ import annotations

import contextlib
import json
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zerostd import api
from zerostd.cli.measure import measured
from zerostd.cli.printing import parameters_text, rows_json, scaling_table, show, state_rows, state_table, write
from zerostd.cli.sources import SEQUENCE, Source, parse_budget, parse_counts, parse_ways
from zerostd.errors import PrepareError
from zerostd.measuring import load_profile
from zerostd.planning import MachineProfile, ModelProfile, Plan
from zerostd.planning.cluster import NO_WIRES, TrainingOptions, plan_on
from zerostd.planning.cluster import scaling as scale
from zerostd.policy import Precision, Stage

WHAT = "What"
WHERE = "Where"
HOW = "How it is trained"
SHOWN = "What is shown"

FACTORY = "A function that returns a model, (model, optimizer) or (model, optimizer, batch)."
META = "Call the function on the meta device: nothing is allocated."
PARAMS = "A GPT with this many parameters, such as 350M, 7.5B or 1T."
CLUSTER = "Profile of another machine, as JSON. Default: this machine."
LIMITS = "The most to use of each tier, such as device=24GiB,host=96GiB,disk=200GiB."
BATCH = "Samples of a step on one rank. Without --samples, the size of a pass is searched."
RECOMPUTE = "Blocks keep only their inputs and are recomputed in backward."
WAYS = "Ways to treat activations, of which the best is chosen: keep,recompute,host, or any."
STEP_SAMPLES = "With --scaling: samples of a step, all ranks together."
PAPER = "Model state by stage and number of devices, as in Table 1 of the ZeRO paper."


def _option(text: str, panel: str, metavar: str) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, metavar=metavar)


def _flag(name: str, text: str, panel: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


def plan(
    function: Annotated[str | None, typer.Argument(metavar="[MODULE:FUNCTION]", help=FACTORY)] = None,
    meta: Annotated[bool, _flag("--meta", META, WHAT)] = False,
    params: Annotated[list[str] | None, _option(PARAMS, WHAT, "SIZE")] = None,
    hidden: Annotated[int | None, _option("Width of the GPT.", WHAT, "N")] = None,
    layers: Annotated[int | None, _option("Number of blocks of the GPT.", WHAT, "N")] = None,
    vocabulary: Annotated[int | None, _option("Rows of the GPT's embedding.", WHAT, "N")] = None,
    config: Annotated[Path | None, _option("The model of a Hugging Face config.json.", WHAT, "FILE")] = None,
    cluster: Annotated[Path | None, _option(CLUSTER, WHERE, "FILE")] = None,
    world: Annotated[int | None, _option("Number of ranks. Default: those of this job.", WHERE, "N")] = None,
    budget: Annotated[str | None, _option(LIMITS, WHERE, "TIER=SIZE")] = None,
    disk_path: Annotated[str | None, _option("The directory of a disk tier on this machine.", WHERE, "DIR")] = None,
    stage: Annotated[int | None, _option("0 to 3. Default: the one with the shortest step.", HOW, "STAGE")] = None,
    samples: Annotated[int | None, _option("Samples of one pass on one rank.", HOW, "N")] = None,
    sequence: Annotated[int | None, _option("Tokens in a sample.", HOW, "N")] = None,
    accumulate: Annotated[int | None, _option("Passes in a step.", HOW, "N")] = None,
    batch: Annotated[int | None, _option(BATCH, HOW, "N")] = None,
    clip: Annotated[bool, _flag("--clip", "Gradients are clipped to a norm.", HOW)] = False,
    recompute: Annotated[bool, _flag("--recompute", RECOMPUTE, HOW)] = False,
    activations: Annotated[str | None, _option(WAYS, HOW, "WAYS")] = None,
    precision: Annotated[str | None, _option("fp32, bf16 or fp16.", HOW, "NAME")] = None,
    scaling: Annotated[str | None, _option("Compare numbers of ranks, such as 64,256,1024.", SHOWN, "N,N,...")] = None,
    step_samples: Annotated[int | None, _option(STEP_SAMPLES, SHOWN, "N")] = None,
    table: Annotated[bool, _flag("--table", PAPER, SHOWN)] = False,
    as_json: Annotated[bool, _flag("--json", "Print JSON, and nothing else.", SHOWN)] = False,
    output: Annotated[Path | None, _option("Save the plan there, for prepare(plan=...).", SHOWN, "FILE")] = None,
) -> None:
    """Plan where model state is kept, and predict how long a step takes."""
    numbers = Precision.parse(precision)
    source = Source(
        numbers, function, meta, tuple(params or ()), hidden, layers, vocabulary, config, samples, sequence, recompute
    )
    options = TrainingOptions(
        1 if world is None else world,
        None if stage is None else Stage.parse(stage),
        accumulate,
        clip,
        numbers.scales_loss,
        parse_budget(budget, disk_path),
        parse_ways(activations),
        batch,
    )
    _check_pass(source, options)
    if step_samples is not None and (scaling is None or step_samples < 1):
        raise PrepareError(f"--step-samples {step_samples} goes with --scaling, and is 1 or more")
    if table:
        if scaling is not None:
            raise PrepareError("--table and --scaling are two things: ask for one")
        if function or output is not None:
            raise PrepareError("--table goes with --params or --config, and with --json, nothing else")
        _show_table(source.profiles(), as_json=as_json)
    elif scaling is not None:
        if output is not None:
            raise PrepareError("--output saves one plan; for --scaling use --json and the shell's >")
        _show_scaling(source, options, cluster, parse_counts(scaling), step_samples, as_json=as_json)
    else:
        title, plan = _plan(source, options, cluster, world)
        if output is not None:
            write(output, plan.to_json())
        typer.echo(plan.to_json() if as_json else f"{title}\n\n{plan.explain()}\n", nl=False)


def _check_pass(source: Source, options: TrainingOptions) -> None:
    """Refuse options about a pass that contradict each other, or that a function's own batch answers."""
    ways = options.activations
    sizes = (source.samples, source.sequence, options.batch)
    if ways and source.recomputes:
        raise PrepareError("--recompute says what --activations leaves open: give one of them")
    if ways and source.samples is None and options.batch is None:
        raise PrepareError("--activations needs to know how large a pass is: give --samples or --batch")
    if source.function and (ways or source.recomputes or any(size is not None for size in sizes)):
        raise PrepareError(
            "--samples, --sequence, --batch, --recompute and --activations go with --params and --config; a function "
            "says it itself: let it return (model, optimizer, batch)"
        )


def _plan(source: Source, options: TrainingOptions, cluster: Path | None, world: int | None) -> tuple[str, Plan]:
    """Return a title and the plan; for a module the one that prepare would make, to the byte."""
    if not source.function:
        profile = source.profile()
        described = _machine(cluster, options.budget.disk_path)
        with _status("planning"):
            plan = plan_on(profile, described, options)
        return f"{profile.name}: {parameters_text(profile.numel)} on {described.name}", plan
    model, optimizer, batch = source.make()
    budget = options.budget
    machine = None if cluster is None else _machine(cluster, budget.disk_path)
    if machine is not None and machine.disk is not None:
        budget = replace(budget, disk_path=machine.disk.path)
    with _status("planning, and measuring this machine if that was not done yet" if machine is None else "planning"):
        plan = api.plan(
            model,
            optimizer,
            budget=budget,
            batch=batch,
            world_size=world,
            machine=machine,
            stage=options.stage,
            precision=source.precision,
            accumulate=options.accumulate,
            max_grad_norm=1.0 if options.clips else None,  # that there is one matters, not which
        )
    numel = sum(parameter.numel() for parameter in model.parameters())
    where = "this machine" if machine is None else machine.name
    if plan.world_size > 1 and plan.predicted.step_s is not None and not (machine is not None and machine.wires):
        plan = replace(plan, notes=(*plan.notes, NO_WIRES))
    return f"{type(model).__name__}: {parameters_text(numel)} on {where}", plan


def _show_scaling(
    source: Source,
    options: TrainingOptions,
    cluster: Path | None,
    worlds: list[int],
    step_samples: int | None,
    *,
    as_json: bool,
) -> None:
    if options.batch is not None:
        raise PrepareError("--batch is of one rank; with --scaling say the samples of a step with --step-samples")
    model = source.profile()
    sequence = SEQUENCE if source.sequence is None and source.params else source.sequence
    machine = _machine(cluster, options.budget.disk_path)
    with _status("planning"):
        rows = scale(model, machine, worlds, use=options, samples_per_step=step_samples)
    if as_json:
        typer.echo(rows_json(rows, sequence), nl=False)
        return
    title = f"{model.name}: {parameters_text(model.numel)} on {machine.name}; predicted, not measured"
    show(title, scaling_table(rows, sequence))
    for row in rows:
        if row.refused:
            typer.echo(f"{row.world_size:,} ranks: {row.refused}")


def _show_table(models: list[ModelProfile], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({model.name: state_rows(model) for model in models}, indent=2))
        return
    for model in models:
        show(f"{model.name}: GB of model state on one device, as in Table 1 of the ZeRO paper", state_table(model))


def _machine(cluster: Path | None, disk_path: str | None) -> MachineProfile:
    """Return the profile of the cluster, or of this machine."""
    if cluster is None:
        return measured(disk_path)
    if disk_path is not None:
        raise PrepareError(
            "--disk-path is of this machine, and --cluster is another: its profile says what disk it has"
        )
    return load_profile(cluster)


def _status(text: str) -> AbstractContextManager[object]:
    """Show a sign of life on a terminal."""
    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else contextlib.nullcontext()
