"""`zerostd plan`: where model state is kept, for a module or for numbers, on this machine or on another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zerostd import api
from zerostd.cli.measure import measured
from zerostd.cli.printing import show_scaling, show_states, title_of, write
from zerostd.cli.sources import Built, check_options, in_precision, make_model, parse_budget, parse_counts, parse_ways
from zerostd.errors import PrepareError
from zerostd.measuring import load_profile
from zerostd.measuring.model import profile_model
from zerostd.planning import MachineProfile, ModelProfile, Plan
from zerostd.planning.cluster import NO_WIRES, ScalingRow, TrainingOptions, plan_on, scaling
from zerostd.planning.described import from_config, from_numbers
from zerostd.policy import Precision, Stage

SEQUENCE = 1024  # tokens of a sample of a model in numbers, if nobody says

FACTORY = "A function that returns a model, (model, optimizer) or (model, optimizer, batch)."
META = "Call the function on the meta device: nothing is allocated."
PARAMS = "A GPT with this many parameters, such as 350M, 7.5B or 1T."
CLUSTER = "Profile of another machine: a JSON file, or five-v100, dgx2-400, h200-1. Default: this machine."
CLUSTERS = Path(__file__).parent / "clusters"  # that come with zerostd, by name
LIMITS = "The most to use of each tier, such as device=24GiB,host=96GiB,disk=200GiB."
BATCH = "Samples of a step on one rank. Without --samples, the size of a pass is searched."
RECOMPUTE = "Blocks keep only their inputs and are recomputed in backward."
WAYS = "Ways to treat activations, of which the best is chosen: keep,recompute,host, or any."
WORLDS = "Compare numbers of ranks, such as 64,256,1024."
STEP_SAMPLES = "With --scaling: samples of a step, all ranks together."
PAPER = "Model state by stage and number of devices, as in Table 1 of the ZeRO paper."

What = partial(typer.Option, rich_help_panel="What")
Where = partial(typer.Option, rich_help_panel="Where")
How = partial(typer.Option, rich_help_panel="How it is trained")
Shown = partial(typer.Option, rich_help_panel="What is shown")


def plan(
    context: typer.Context,
    function: Annotated[str | None, typer.Argument(metavar="[MODULE:FUNCTION]", help=FACTORY)] = None,
    meta: Annotated[bool, What("--meta", help=META)] = False,
    params: Annotated[list[str] | None, What(metavar="SIZE", help=PARAMS)] = None,
    hidden: Annotated[int | None, What(metavar="N", help="Width of the GPT.")] = None,
    layers: Annotated[int | None, What(metavar="N", help="Number of blocks of the GPT.")] = None,
    vocabulary: Annotated[int | None, What(metavar="N", help="Rows of the GPT's embedding.")] = None,
    config: Annotated[Path | None, What(metavar="FILE", help="The model of a Hugging Face config.json.")] = None,
    cluster: Annotated[Path | None, Where(metavar="FILE", help=CLUSTER)] = None,
    world: Annotated[int | None, Where(metavar="N", help="Number of ranks. Default: those of this job.")] = None,
    budget: Annotated[str | None, Where(metavar="TIER=SIZE", help=LIMITS)] = None,
    disk_path: Annotated[str | None, Where(metavar="DIR", help="The directory of a disk tier on this machine.")] = None,
    stage: Annotated[int | None, How(metavar="STAGE", help="0 to 3. Default: the one with the shortest step.")] = None,
    samples: Annotated[int | None, How(metavar="N", help="Samples of one pass on one rank.")] = None,
    sequence: Annotated[int | None, How(metavar="N", help="Tokens in a sample.")] = None,
    accumulate: Annotated[int | None, How(metavar="N", help="Passes in a step.")] = None,
    batch: Annotated[int | None, How(metavar="N", help=BATCH)] = None,
    clip: Annotated[bool, How("--clip", help="Gradients are clipped to a norm.")] = False,
    recompute: Annotated[bool, How("--recompute", help=RECOMPUTE)] = False,
    activations: Annotated[str | None, How(metavar="WAYS", help=WAYS)] = None,
    precision: Annotated[str | None, How(metavar="NAME", help="fp32, bf16 or fp16.")] = None,
    scaling: Annotated[str | None, Shown(metavar="N,N,...", help=WORLDS)] = None,
    step_samples: Annotated[int | None, Shown(metavar="N", help=STEP_SAMPLES)] = None,
    table: Annotated[bool, Shown("--table", help=PAPER)] = False,
    as_json: Annotated[bool, Shown("--json", help="Print JSON, and nothing else.")] = False,
    output: Annotated[Path | None, Shown(metavar="FILE", help="Save the plan there, for prepare(plan=...).")] = None,
) -> None:
    """Plan where model state is kept, and predict how long a step takes."""
    check_options(context.params)
    numbers = Precision.parse(precision)
    options = TrainingOptions(
        world_size=1 if world is None else world,
        stage=None if stage is None else Stage.parse(stage),
        accumulate=accumulate,
        clips=clip,
        scales_loss=numbers.scales_loss,
        budget=parse_budget(budget, disk_path),
        activations=parse_ways(activations),
        batch=batch,
    )
    tokens = SEQUENCE if sequence is None else sequence
    gpt = partial(from_numbers, hidden=hidden, layers=layers, vocabulary=vocabulary, samples=samples)
    models = [gpt(size, sequence=tokens) for size in params or ()]
    if config is not None:
        models = [from_config(config, sequence=sequence, samples=samples)]
    models = [replace(in_precision(model, numbers), recomputes=recompute) for model in models]
    source = make_model(function, is_meta=meta) if function else models[0]
    if table:
        show_states(models, as_json=as_json)
    elif scaling is not None:
        title, rows = _scale(source, options, numbers, cluster, parse_counts(scaling), step_samples)
        show_scaling(title, rows, tokens if params else sequence, as_json=as_json)
    else:
        title, plan = _plan(source, options, numbers, cluster, world)
        if output is not None:
            write(output, plan.to_json())
        typer.echo(plan.to_json() if as_json else f"{title}\n\n{plan.explain()}\n", nl=False)


def _plan(
    source: ModelProfile | Built,
    options: TrainingOptions,
    precision: Precision,
    cluster: Path | None,
    world: int | None,
) -> tuple[str, Plan]:
    """Return a title and the plan; for a module the one that prepare would make, to the byte."""
    budget = options.budget
    if isinstance(source, ModelProfile):
        described = _machine(cluster, budget.disk_path)
        with Console(stderr=True).status("planning"):
            plan = plan_on(source, described, options)
        return title_of(source.name, source.numel, described.name), plan
    model, optimizer, batch = source
    machine = None if cluster is None else _machine(cluster, budget.disk_path)
    if machine is not None and machine.disk is not None:
        budget = replace(budget, disk_path=machine.disk.path)
    doing = "planning, and measuring this machine if that was not done yet" if machine is None else "planning"
    with Console(stderr=True).status(doing):
        plan = api.plan(
            model,
            optimizer,
            budget=budget,
            batch=batch,
            world_size=world,
            machine=machine,
            stage=options.stage,
            precision=precision,
            accumulate=options.accumulate,
            max_grad_norm=1.0 if options.clips else None,  # that there is one matters, not which
        )
    numel = sum(parameter.numel() for parameter in model.parameters())
    title = title_of(type(model).__name__, numel, "this machine" if machine is None else machine.name)
    if plan.world_size > 1 and plan.predicted.step_s is not None and not (machine is not None and machine.wires):
        plan = replace(plan, notes=(*plan.notes, NO_WIRES))
    return title, plan


def _scale(
    source: ModelProfile | Built,
    options: TrainingOptions,
    precision: Precision,
    cluster: Path | None,
    worlds: list[int],
    step_samples: int | None,
) -> tuple[str, list[ScalingRow]]:
    """Return a title and a row for each number of ranks."""
    if isinstance(source, ModelProfile):
        profile = source
    else:
        model, optimizer, batch = source
        profile = profile_model(model, optimizer, precision=precision, batch=batch)
    machine = _machine(cluster, options.budget.disk_path)
    with Console(stderr=True).status("planning"):
        rows = scaling(profile, machine, worlds, use=options, samples_per_step=step_samples)
    return f"{title_of(profile.name, profile.numel, machine.name)}; predicted, not measured", rows


def _machine(cluster: Path | None, disk_path: str | None) -> MachineProfile:
    """Return the profile of the cluster, or of this machine."""
    if cluster is None:
        return measured(disk_path)
    if disk_path is not None:
        raise PrepareError(
            "--disk-path is of this machine, and --cluster is another: its profile says what disk it has"
        )
    packaged = {path.stem: path for path in CLUSTERS.glob("*.json")}
    if not cluster.exists() and cluster.name == str(cluster) and not cluster.suffix and cluster.name not in packaged:
        raise PrepareError(
            f"--cluster {cluster}: there is no such file, and the clusters are {', '.join(sorted(packaged))}"
        )
    return load_profile(packaged.get(str(cluster), cluster) if not cluster.exists() else cluster)
