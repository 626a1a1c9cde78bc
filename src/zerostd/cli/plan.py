"""`zerostd plan`: where model state is kept, for a module or for numbers, on this machine or on another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zerostd import api
from zerostd.cli.machines import find_machine
from zerostd.cli.measure import measured
from zerostd.cli.printing import in_options, show_scaling, show_states, title_of, write
from zerostd.cli.sources import Built, check_options, make_model, parse_budget, parse_counts, parse_ways
from zerostd.engine.settings import Settings
from zerostd.errors import PrepareError
from zerostd.measuring.model import profile_model
from zerostd.monitoring.texts import size_text
from zerostd.planning import MachineProfile, ModelProfile, Plan
from zerostd.planning.described import from_config, from_numbers
from zerostd.planning.profiles import CODABLE
from zerostd.policy import Precision, Stage, Tier, limit_of
from zerostd.preparing.scaling import ScalingRow, plan_numbers
from zerostd.preparing.scaling import scaling as worlds_of
from zerostd.reporting import plan_page

SEQUENCE = 1024  # tokens of a sample of a model in numbers, if nobody says

FACTORY = "A function that returns a model, (model, optimizer) or (model, optimizer, batch)."
META = "Call the function on the meta device: nothing is allocated."
PARAMS = "A GPT with this many parameters, such as 350M, 7.5B or 1T."
MACHINE = (
    "Another machine, such as 8xh100-80 or 4x8xa100-80; dgx2-400, five-v100 or h200-1; or the path of a JSON profile. "
    "Default: this machine."
)
LIMITS = "Limit of each tier, such as device=24GiB,host=96GiB,disk=200GiB."
BATCH = "Samples in a step on one rank. Without --samples, the planner also chooses the size of a pass."
RECOMPUTE = "Recompute all activations in backward: short for --activations recompute."
WAYS = "Ways of activations to choose among: keep,recompute,recompute+host,host, or any. Default: any."
EXACT = "--no-exact lets the plan keep Adam's moments in 8 bits, as prepare(exact=False) does."
WORLDS = "Compare numbers of ranks, such as 64,256,1024. Without --samples, the planner chooses the pass size for each."
STEP_SAMPLES = "With --scaling: samples in a step over all ranks."
HTML = "Write the plan as a page, with the simulated step and plans for other budgets of the device."
PARTS = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)  # of the device's limit, planned for too
PAPER = "Show model state by stage and number of devices, as in Table 1 of the ZeRO paper."

What = partial(typer.Option, rich_help_panel="Model")
Where = partial(typer.Option, rich_help_panel="Machine")
How = partial(typer.Option, rich_help_panel="Training")
Shown = partial(typer.Option, rich_help_panel="Output")


def plan(
    context: typer.Context,
    function: Annotated[str | None, typer.Argument(metavar="[MODULE:FUNCTION]", help=FACTORY)] = None,
    meta: Annotated[bool, What("--meta", help=META)] = False,
    params: Annotated[list[str] | None, What(metavar="SIZE", help=PARAMS)] = None,
    hidden: Annotated[int | None, What(metavar="N", help="Width of the GPT.")] = None,
    layers: Annotated[int | None, What(metavar="N", help="Number of blocks of the GPT.")] = None,
    vocabulary: Annotated[int | None, What(metavar="N", help="Rows of the GPT's embedding.")] = None,
    config: Annotated[Path | None, What(metavar="FILE", help="The model of a Hugging Face config.json.")] = None,
    machine: Annotated[str | None, Where("--machine", "--cluster", metavar="NAME", help=MACHINE)] = None,
    world: Annotated[int | None, Where(metavar="N", help="Number of ranks. Default: as in this job.")] = None,
    budget: Annotated[str | None, Where(metavar="TIER=SIZE", help=LIMITS)] = None,
    disk_path: Annotated[str | None, Where(metavar="DIR", help="The directory of a disk tier on this machine.")] = None,
    stage: Annotated[int | None, How(metavar="STAGE", help="0 to 3. Default: the fastest that fits.")] = None,
    samples: Annotated[int | None, How(metavar="N", help="Samples in a pass on one rank.")] = None,
    sequence: Annotated[int | None, How(metavar="N", help="Tokens in a sample.")] = None,
    accumulate: Annotated[int | None, How(metavar="N", help="Passes in a step.")] = None,
    batch: Annotated[int | None, How(metavar="N", help=BATCH)] = None,
    clip: Annotated[bool, How("--clip", help="Clip gradients to a norm.")] = False,
    recompute: Annotated[bool, How("--recompute", help=RECOMPUTE)] = False,
    activations: Annotated[str | None, How(metavar="WAYS", help=WAYS)] = None,
    exact: Annotated[bool, How(help=EXACT)] = True,
    precision: Annotated[str | None, How(metavar="NAME", help="fp32, bf16 or fp16.")] = None,
    scaling: Annotated[str | None, Shown(metavar="N,N,...", help=WORLDS)] = None,
    step_samples: Annotated[int | None, Shown(metavar="N", help=STEP_SAMPLES)] = None,
    table: Annotated[bool, Shown("--table", help=PAPER)] = False,
    as_json: Annotated[bool, Shown("--json", help="Print JSON and nothing else.")] = False,
    output: Annotated[Path | None, Shown(metavar="FILE", help="Save the plan for prepare(plan=...).")] = None,
    html: Annotated[Path | None, Shown(metavar="FILE", help=HTML)] = None,
) -> None:
    """Plan where model state is kept, and predict how long a step takes."""
    check_options(context.params)
    described, num_ranks = find_machine(machine, disk_path)
    world = num_ranks if world is None else world
    settings = Settings(
        stage=None if stage is None else Stage.parse(stage),
        precision=Precision.parse(precision),
        accumulate=accumulate,
        max_grad_norm=1.0 if clip else None,  # that there is one matters, not which
        budget=parse_budget(budget, disk_path),
        codable=frozenset() if exact else CODABLE,
    )
    tokens = SEQUENCE if sequence is None else sequence
    gpt = partial(from_numbers, hidden=hidden, layers=layers, vocabulary=vocabulary, samples=samples)
    models = [gpt(size, sequence=tokens) for size in params or ()]
    models += [] if config is None else [from_config(config, sequence=sequence, samples=samples)]
    source = make_model(function, is_meta=meta) if function else models[0]
    ways = parse_ways("recompute" if recompute else activations)
    if table:
        show_states(models, as_json=as_json)
    elif scaling is not None:
        scale = partial(worlds_of, worlds=parse_counts(scaling), ways=ways, samples_per_step=step_samples)
        title, rows = _scale(source, settings, described, scale)
        show_scaling(title, rows, tokens if params else sequence, as_json=as_json)
    elif isinstance(source, ModelProfile):
        plan_with = partial(_plan_numbers, source, described, partial(plan_numbers, batch=batch, ways=ways), world)
        _show(plan_with, settings, output, html, as_json=as_json)
    else:
        built = _profiled(source, settings.precision, described, world)
        _show(partial(_plan_module, built, described, world), settings, output, html, as_json=as_json)


def _profiled(source: Built, precision: Precision, machine: MachineProfile | None, world: int | None) -> Built:
    """Measure a module that has a batch, and put its needs in place of the batch: plans for several budgets agree."""
    model, optimizer, batch = source
    if optimizer is None or batch is None:
        return source
    measure = partial(profile_model, model, optimizer, precision=precision, num_ranks=world or 1)
    return model, optimizer, measure(batch=batch, probe=machine is None)


PlanWith = Callable[[Settings], tuple[str, Plan]]  # returns a title too


def _show(plan_with: PlanWith, settings: Settings, output: Path | None, html: Path | None, *, as_json: bool) -> None:
    """Make a plan, write the files that were asked for, and print it."""
    title, plan = plan_with(settings)
    if output is not None:
        write(output, plan.to_json())
    if html is not None:
        write(html, plan_page(title, plan, _for_other_budgets(plan, settings, plan_with)))
    typer.echo(plan.to_json() if as_json else f"{title}\n\n{in_options(plan.explain())}\n", nl=False)


def _for_other_budgets(plan: Plan, settings: Settings, plan_with: PlanWith) -> list[Plan]:
    """Return the plan, and those for less and more of the device that fit."""
    plans = [plan]
    for part in PARTS:
        budget = replace(settings.budget, device=int(part * plan.limits[Tier.DEVICE]))
        with contextlib.suppress(PrepareError):
            plans.append(plan_with(replace(settings, budget=budget))[1])
    return plans


def _plan_numbers(
    model: ModelProfile,
    machine: MachineProfile | None,
    plan_on: Callable[[ModelProfile, MachineProfile, Settings, int], Plan],
    world: int | None,
    settings: Settings,
) -> tuple[str, Plan]:
    """Return a title and the plan of a model in numbers."""
    here = machine is None
    machine = machine or measured(settings.budget.disk_path)
    with Console(stderr=True).status("planning"):
        plan = plan_on(model, machine, settings, 1 if world is None else world)
    name = f"this machine ({machine.name})" if here else machine.name
    return title_of(model.name, model.numel, name), _with_notes(plan, machine, settings, here=here)


def _plan_module(
    source: Built, machine: MachineProfile | None, world: int | None, settings: Settings
) -> tuple[str, Plan]:
    """Return a title and the plan that prepare would make of a module, to the byte."""
    budget = settings.budget
    here = machine is None
    model, optimizer, batch = source
    if machine is not None and machine.disk is not None:
        budget = replace(budget, disk_path=machine.disk.path)
    doing = "planning; measuring this machine first if there is no profile yet" if here else "planning"
    with Console(stderr=True).status(doing):
        plan = api.plan(
            model,
            optimizer,
            budget=budget,
            batch=batch,
            world_size=world,
            machine=machine,
            stage=settings.stage,
            precision=settings.precision,
            accumulate=settings.accumulate,
            max_grad_norm=settings.max_grad_norm,
            exact=settings.exact,
        )
    numel = sum(parameter.numel() for parameter in model.parameters())
    return title_of(type(model).__name__, numel, "this machine" if machine is None else machine.name), plan


def _with_notes(plan: Plan, machine: MachineProfile, settings: Settings, *, here: bool) -> Plan:
    """Return the plan, with a note if it is for more memory than the machine has whose rates it uses."""
    free = machine.free.get("device", 0)
    limit = limit_of(settings.budget.device)
    if limit is None or limit <= free:
        return plan
    whose = "this machine" if here else machine.name
    advice = " Name another machine with --machine, such as 8xh100-80." if here else ""
    note = f"The budget for the device is {size_text(limit)}, but {whose} has {size_text(free)} free. "
    return replace(plan, notes=(*plan.notes, f"{note}All rates are those of {whose}.{advice}"))


def _scale(
    source: ModelProfile | Built,
    settings: Settings,
    machine: MachineProfile | None,
    scale: Callable[..., list[ScalingRow]],
) -> tuple[str, list[ScalingRow]]:
    """Return a title and a row for each number of ranks."""
    if isinstance(source, ModelProfile):
        profile = source
    else:
        model, optimizer, batch = source
        profile = profile_model(model, optimizer, precision=settings.precision, batch=batch)
    machine = machine or measured(settings.budget.disk_path)
    with Console(stderr=True).status("planning"):
        rows = scale(profile, machine, settings=settings)
    return f"{title_of(profile.name, profile.numel, machine.name)}; predicted, not measured", rows
