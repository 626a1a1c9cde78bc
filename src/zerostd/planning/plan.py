"""A plan: what is kept where, by which route it is updated, and what that is predicted to cost. It is frozen, and JSON
both ways; a plan written by hand is obeyed like any other."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, get_type_hints

from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.decoding import convert, convert_given, decode, path_of, read_document
from zerostd.monitoring.texts import percent_text, plain_seconds, rate_text, seconds_text, short_size
from zerostd.planning.profiles import RECOMPUTED, WAYS
from zerostd.policy import LOSSLESS, Homes, Kind, Placement, Route, Stage, Tier, Way

VERSION = 1
GIB = 2**30
REMEDY = "correct it, or plan again"
DOES = {
    "recompute": "recompute them in",
    "recompute+host": "recompute them from inputs on the host in",
    "host": "send them to the host in",
    "keep": "keep them in",
}
MOST_NAMED = 4  # stretches of groups
Span = tuple[str, str, str, float, float]  # worker, what it does, group, start, end
MOST_COLUMNS = 80  # of the table
WORDS = {
    "up": "the link to the device",
    "down": "the link from the device",
    "link": "the link, both directions together",
    "cpu": "the CPU",
    "memory": "host memory",
    "read": "reading from disk",
    "write": "writing to disk",
    "disk": "the disk, reading and writing together",
    "wire": "communication between ranks",
    "compute": "compute on the device",
}


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a plan on one rank."""

    step_s: float | None = None  # None: the size of a batch is not known
    compute_s: float | None = None  # the part of it in which the device computes
    clipped_s: float | None = None  # a clipped step, where updates begin before the norm is known
    bytes: Mapping[Tier, Mapping[Kind, int]] = field(default_factory=dict)  # at their peak
    busy: Mapping[str, float] = field(default_factory=dict)  # seconds of work in a step, by resource
    prices: Mapping[Tier, float] = field(default_factory=dict)  # seconds a step is shorter for a byte of the next GiB
    samples: int | None = None  # in a pass, of a model that is not updated: then a step is a pass
    launches: float = 0.0  # part of forward in which the host launches kernels

    def total(self, tier: Tier) -> int:
        return sum(self.bytes.get(tier, {}).values())

    @property
    def samples_per_s(self) -> float | None:
        """Return samples per second of a model that is not trained: tokens, if a pass makes one for each sequence."""
        return self.samples / self.step_s if self.samples and self.step_s else None

    @property
    def bottleneck(self) -> str:
        busy = {**self.busy, "compute": self.compute_s or 0.0}
        return max(busy, key=lambda name: busy[name]) if busy else "compute"


@dataclass(frozen=True)
class Trial:
    """A candidate plan, with the predicted and the measured time of its steps."""

    name: str  # what sets it apart
    predicted_s: float | None  # of a step
    measured_s: float  # the median of its steps, on the slowest rank


@dataclass(frozen=True)
class Plan:
    """Says where state is kept, by which route it is updated, and the predicted cost.

    The keys of `homes` and `activations` are names of groups, or globs of names. You may also write a plan by hand:
    only `homes` is required.
    """

    homes: Mapping[str, Homes]
    stage: Stage = Stage.PARAMETERS
    world_size: int = 1  # ranks that share the model state
    num_replicas: int = 1  # of it, each on as many neighbouring ranks
    speculate: bool = False
    keep_gradients: bool = True
    adaptive: bool = True  # may be revised during training, when it proves wrong
    codec: Mapping[str, str] = field(default_factory=dict)  # as in a Placement
    predicted: Prediction = field(default_factory=Prediction)
    limits: Mapping[Tier, int] = field(default_factory=dict)  # bytes it was made for
    notes: tuple[str, ...] = ()  # reasons for it, and what was refused
    activations: Mapping[str, str] = field(default_factory=dict)  # of WAYS; empty: as the model itself does it
    trials: tuple[Trial, ...] = ()  # candidates that training measured, this one first
    spans: tuple[Span, ...] = field(default=(), repr=False, compare=False)  # of a simulated step; not in its JSON

    def __post_init__(self) -> None:
        for name, kind in _kinds_of_fields().items():
            what = f"a plan: {name}"
            given = getattr(self, name)
            converted = convert_given(given, kind, what=what, error=PrepareError)
            object.__setattr__(self, name, given if given == converted else converted)
        object.__setattr__(self, "stage", Stage(self.stage))
        for name, way in self.activations.items():
            if way not in WAYS:
                raise PrepareError(f"activations of {name!r} are {way!r}; use one of {', '.join(WAYS)}")

    @property
    def is_untried(self) -> bool:
        """Return whether it was made without a batch, and recomputes until a pass has shown the size of activations."""
        recomputes = len(self.activations) == 1 and self.activations.get("*") in RECOMPUTED
        return recomputes and self.predicted.step_s is None and bool(self.limits)

    def homes_of(self, group: str) -> Homes:
        """Return the homes of one group, by its name or by the first glob that matches it."""
        homes: Homes | None = _by_name(self.homes, str(group))
        if homes is None:
            raise PrepareError(
                f"the plan has no homes for group {group!r}: it was made for another model or other groups=. Plan "
                "again, or give homes for '*'"
            )
        return homes

    def activations_of(self, group: str) -> str | None:
        """Return how one group handles its activations, one of WAYS; None if the plan does not say."""
        way: str | None = _by_name(self.activations, group)
        return way

    def placement(self, sizes: Mapping[str, float]) -> Placement:
        """Return the plan as a placement, in shares of the whole model, for groups of these sizes."""
        if not sizes:
            return Placement(speculate=self.speculate, keep_gradients=self.keep_gradients, codec=self.codec)
        total = sum(sizes.values()) or 1.0
        parts = {kind: dict.fromkeys(Tier, 0.0) for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)}
        by_cpu = 0.0
        off = 0.0
        for name, size in sizes.items():
            homes = self.homes_of(name)
            parts[Kind.PARAMETERS][homes.parameters] += size / total
            parts[Kind.GRADIENTS][homes.gradients] += size / total
            for tier, route, share in homes.states:
                parts[Kind.OPTIMIZER_STATES][tier] += size * share / total
                off += size * share if tier is not Tier.DEVICE else 0.0
                by_cpu += size * share if route is Route.CPU else 0.0
        shares: dict[str, Any] = {kind.value: _tidy(tiers) for kind, tiers in parts.items()}
        ways = {name: Way(self.activations_of(name) or Way.DEVICE).value for name in sizes}
        activations: Any = ways if len(set(ways.values())) > 1 else next(iter(ways.values()))
        return Placement(
            **shares,
            activations=activations,
            cpu_share=by_cpu / off if off else None,
            speculate=self.speculate,
            keep_gradients=self.keep_gradients,
            codec=self.codec,
        )

    def to_json(self) -> str:
        """Return the plan as JSON, which `from_json` reads."""
        data = asdict(replace(self, spans=()))
        del data["spans"]
        if list(self.activations) == ["*"]:
            data["activations"] = self.activations["*"]
        return json.dumps({"version": VERSION, **data}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "plan") -> Self:
        """Read a plan from JSON. A plan written by hand needs only `homes`."""
        data = decode(text, dict[str, Any], what=source, error=PrepareError, remedy=REMEDY)
        version = data.pop("version", VERSION)
        if version != VERSION:
            raise PrepareError(f"{source} has version {version!r}, but this zerostd reads {VERSION}; {REMEDY}")
        if isinstance(data.get("activations"), str):
            data["activations"] = {"*": data["activations"]}
        return convert(data, cls, what=source, error=PrepareError, remedy=REMEDY, refuse_unknown=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file."""
        file = path_of(path, "path", PrepareError)
        try:
            file.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"the plan cannot be written to {path}: {error.strerror}; name another file") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a file."""
        text = read_document(path, what=f"the plan {path}", error=PrepareError, remedy=REMEDY)
        return cls.from_json(text, f"the plan {path}")

    def explain(self) -> str:
        """Return the plan as a table and sentences."""
        return "\n".join([*_table(self), "", *_sentences(self)])


@functools.cache
def _kinds_of_fields() -> dict[str, Any]:
    """Return the type of each field that a user may write."""
    return {name: kind for name, kind in get_type_hints(Plan).items() if name != "spans"}


def _tidy(tiers: Mapping[Tier, float]) -> str | dict[str, float]:
    kept = {tier: share for tier, share in tiers.items() if share > 1e-9}
    if len(kept) == 1:
        return next(iter(kept)).value
    total = sum(kept.values())
    return {tier.value: share / total for tier, share in kept.items()}


def _by_name(table: Mapping[str, Any], group: str) -> Any:
    if group in table:
        return table[group]
    return next((entry for pattern, entry in table.items() if fnmatch.fnmatchcase(group, pattern)), None)


def _table(plan: Plan) -> list[str]:
    kinds = [kind for kind in Kind if any(plan.predicted.bytes.get(tier, {}).get(kind) for tier in Tier)]
    rows = [["tier", *(kind.value.removeprefix("optimizer_") for kind in kinds), "total", "limit"]]
    for tier in Tier:
        held = plan.predicted.bytes.get(tier, {})
        limit = plan.limits.get(tier)
        if not plan.predicted.total(tier) and limit is None:
            continue
        sizes = [*(held.get(kind, 0) for kind in kinds), plan.predicted.total(tier)]
        rows.append([tier.value, *map(short_size, sizes), "" if limit is None else short_size(limit)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * len(widths) <= MOST_COLUMNS else " "
    return [gap.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _sentences(plan: Plan) -> list[str]:
    predicted = plan.predicted
    ranks = f"{plan.world_size} rank" + ("s" if plan.world_size > 1 else "")
    ranks += f" for each of {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    lines = [f"Stage {plan.stage.value} on {ranks}" + (", with speculative updates." if plan.speculate else ".")]
    if not plan.keep_gradients:
        lines.append("Gradients are freed as groups are updated inside backward, so p.grad cannot be read.")
    if plan.codec:
        coded = ", ".join(f"{what.replace('_', ' ')} ({codec})" for what, codec in plan.codec.items())
        is_exact = set(plan.codec.values()) == {LOSSLESS}
        lines.append(f"Coded: {coded}." + ("" if is_exact else " Results differ from those with exact=True."))
    if plan.activations:
        lines.append(f"Activations: {'; '.join(_activations_in_words(plan.activations))}.")
    if predicted.step_s is not None and predicted.step_s > 0:
        busy = {**predicted.busy, "compute": predicted.compute_s or 0.0}
        first, *rest = sorted(busy, key=lambda name: -busy[name])
        shares = {name: percent_text(seconds / predicted.step_s) for name, seconds in busy.items()}
        what = "step" if predicted.samples is None else "pass"
        lines.append(
            f"A {what} takes {plain_seconds(predicted.step_s)}. The bottleneck is {WORDS.get(first, first)}, busy "
            f"{shares[first]} of it"
            + (f"; next is {WORDS.get(rest[0], rest[0])} with {shares[rest[0]]}." if rest else ".")
        )
        if predicted.samples_per_s is not None:
            lines.append(
                f"That is {rate_text(predicted.samples_per_s)} samples per second, or as many tokens if each pass "
                "generates one token per sequence."
            )
        if predicted.clipped_s is not None:
            clipped = f"A clipped step takes {plain_seconds(predicted.clipped_s)}."
            lines.append(f"Updates begin before the norm is known. {clipped}")
        for tier in Tier:
            gain = predicted.prices.get(tier, 0.0) * GIB
            if tier in plan.limits and predicted.samples is None:
                worth = f"would save {seconds_text(gain)} a step" if gain > 1e-6 else "would not shorten the step"
                lines.append(f"One more GiB of the {tier.value} {worth}.")
    if plan.trials:
        measured = (f"{plain_seconds(trial.measured_s)} with {trial.name}" for trial in plan.trials)
        lines.append(f"Measured while training: {'; '.join(measured)}. The first is in use.")
    return [*lines, *plan.notes]


def _activations_in_words(activations: Mapping[str, str]) -> Iterator[str]:
    """Yield which groups do what, neighbours together."""
    stretches = [(way, list(names)) for way, names in itertools.groupby(activations, key=activations.__getitem__)]
    for way, does in DOES.items():
        alike = [names for each, names in stretches if each == way]
        if not alike:
            continue
        names = [stretch[0] if len(stretch) == 1 else f"{stretch[0]} to {stretch[-1]}" for stretch in alike]
        count = sum(len(stretch) for stretch in alike)
        text = ", ".join(names[:MOST_NAMED]) + (" and more" if len(names) > MOST_NAMED else "")
        yield f"{does} {'all groups' if text == '*' else text}" + (f" ({count} groups)" if count > 1 else "")
