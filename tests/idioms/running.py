"""One idiom in one form: the outcome, and why.

same        the result is that of plain torch
same error  in bf16: plain torch with bf16 parameters raises the same error at the same line
refused     a zerostd error that names a remedy, raised at the idiom's own line
different   it ran, and the result is another one, or NaN: what must never happen
error       anything else was raised, or refused too late: an accident

Forms of one rank run in one process, forms of two ranks in two, which stay for all idioms. Ranks of which one raised
alone are apart for good: they are ended, and the next idiom gets new ones.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerostd
from idioms.forms import ALMOST, BITWISE, BY_NAME, HALVED, PLAIN, ROUNDED, Form
from idioms.loop import Idiom, Loop, idioms
from support.compare import relative_error
from support.processes import RankPool

SAME = "same"
SAME_ERROR = "same error"
REFUSED = "refused"
DIFFERENT = "different"
ERROR = "error"
VISIBLE = 2 * ROUNDED  # what leaving the idiom out must change at least
MOST_ROUNDED = 0.1
TIMEOUT_S = 2.0  # a rank that raised alone is missed by the others for so long
LATE = re.compile(r"\.backward\(|optimizer\.step\(|loop\.(step|train|outcome|weights)\(")
REMEDY = re.compile(
    r"zerostd\.\w+|prepare\(|optimizer\.\w+\(|\b(use|call|set|put|leave|pass|give|make|build|move|choose|write|keep|load|tie|change)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """What came of one idiom in one form."""

    outcome: str
    detail: str = ""  # the tensor that differs most, or what was raised
    line: int | None = None  # of the idiom's file, where it was raised
    source: str = ""  # that line
    kind: str = ""  # the type of what was raised

    @property
    def timed_out(self) -> bool:
        """Whether ranks missed each other, which may be the machine's fault."""
        return "gave up waiting" in self.detail or "died or hung" in self.detail


# -- inside a process --


def run_idiom(idiom: Idiom, form: Form, *, is_active: bool = True) -> tuple[Any, Loop]:
    """Run an idiom once; returns what it returned, as a flat dict of copies."""
    return run_loop(idiom, partial(Loop, is_active=is_active), form)


def run_loop(
    idiom: Idiom, make: Callable[[Form, Path], Loop], form: Form, whole: Callable[[Any], Any] = lambda value: value
) -> tuple[Any, Loop]:
    """Do the same with a loop of its own; `whole` makes what is compared of each value that the idiom returned."""
    directory = Path(tempfile.mkdtemp(prefix="idiom_"))
    loop = make(form, directory)
    torch.manual_seed(5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {key: whole(value) for key, value in _leaves("", idiom.run(loop))}, loop
    finally:
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)
        torch.set_default_dtype(torch.float32)


@functools.cache
def _plain(name: str) -> tuple[dict[str, Any], bool]:
    """What plain torch makes of an idiom, and whether it has a control."""
    result, loop = run_idiom(idioms()[name], PLAIN)
    return result, loop.has_control


def plain_result(name: str) -> dict[str, Any]:
    """What plain torch makes of an idiom."""
    return _plain(name)[0]


@functools.cache
def visible_effect(name: str) -> float | None:
    """How much the outcome under plain torch changes if the idiom's own lines are left out; None if it has none."""
    whole, has_control = _plain(name)
    if not has_control:
        return None
    control, _ = run_idiom(idioms()[name], PLAIN, is_active=False)
    if control.keys() != whole.keys():
        return float("inf")
    return max((_error(control[key], whole[key], ROUNDED) for key in whole), default=0.0)


def try_idiom(rank: int, name: str, form_name: str, timeout_s: float) -> dict[str, Any]:
    """Run one idiom in one form, on this rank, and compare it with plain torch."""
    os.environ["ZEROSTD_TIMEOUT_S"] = str(timeout_s)
    idiom = idioms()[name]
    form = BY_NAME[form_name]
    expected = plain_result(name)
    _leave_modules_uncollected()
    try:
        result, _ = run_idiom(idiom, form)
    except Exception as error:
        outcome = judge_raised(idiom, error)
    else:
        outcome = judge(result, expected, idiom, form)
        if outcome.outcome == DIFFERENT and form.tolerance == ROUNDED and idiom.name in ROUNDED_FAR:
            outcome = judge(result, run_idiom(idiom, HALVED)[0], idiom, form)
    if outcome.outcome == ERROR and form.tolerance == ROUNDED and raised_halved(idiom) == (outcome.kind, outcome.line):
        outcome = replace(outcome, outcome=SAME_ERROR)
    gc.collect()  # models hold threads and files, in cycles
    return asdict(outcome)


@functools.cache
def _leave_modules_uncollected() -> None:
    """Collecting garbage takes half a second with all of torch to look at, and a millisecond without."""
    gc.collect()
    gc.freeze()


def judge(result: dict[str, Any], expected: dict[str, Any], idiom: Idiom, form: Form) -> Outcome:
    if result.keys() != expected.keys():
        return Outcome(DIFFERENT, f"other names: {sorted(result.keys() ^ expected.keys())[:3]}")
    tolerance = _tolerance(idiom, form)
    errors = {key: _error(result[key], expected[key], form.tolerance) for key in expected}
    worst = max(errors, key=lambda key: errors[key], default="")
    if not errors or errors[worst] <= tolerance:
        return Outcome(SAME)
    has_nan = isinstance(result[worst], Tensor) and bool(result[worst].isnan().any())
    return Outcome(DIFFERENT, f"{worst} {'is NaN' if has_nan else f'is off by {errors[worst]:.1e}'}")


def raised_halved(idiom: Idiom) -> tuple[str, int | None] | None:
    """Return the type of what plain torch with bf16 parameters raises, and the line of the idiom; None if nothing."""
    try:
        run_idiom(idiom, HALVED)
    except Exception as error:
        raised = judge_raised(idiom, error)
        return raised.kind, raised.line
    return None


def _tolerance(idiom: Idiom, form: Form) -> float:
    """In bf16 an idiom with a large effect may be rounded more: by a fifth of it."""
    if form.tolerance == ROUNDED:
        return min(max(ROUNDED, 0.2 * (visible_effect(idiom.name) or 0.0)), MOST_ROUNDED)
    return max(form.tolerance, BITWISE if idiom.exact else ALMOST)


ROUNDED_FAR = {  # what rounding alone moves further than that: compared with plain torch in bf16
    "clamp_a_temperature": "a temperature in bf16 has three digits, and the loss is steep in it",
    "optimizers_of_less_use": "Rprop steps by the signs of gradients, and the smallest are rounded to either sign",
}


SEEN_LATER = {  # what is refused at the next call of ours, since nothing of ours is called before
    "learning_rate_set_between_backward_and_step": "param_groups are dicts of the user's",
    "schedule_stepped_before_the_optimizer": "param_groups are dicts of the user's",
    "optimizer_after_release": "making an optimizer is no mistake, its step is",
    "backward_that_is_never_stepped": "the pass is no mistake, dropping its gradients is",
}


THEIR_REFUSALS = {  # of numpy and torch, which we make them raise; the table names the remedy
    "is read-only": "Write to the parameter: `p.copy_(torch.from_numpy(array))` under `torch.no_grad()`",
    "has weakref associated with it": "Exchange values: `p.copy_(values)` under `torch.no_grad()`",
    "Got unsupported ScalarType BFloat16": "NumPy has no bf16: read `p.float()`",
    "None is covering the entire storage": "Save `zerostd.full_state_dict(model)` with `safetensors.torch.save_file`",
}


def judge_raised(idiom: Idiom, error: Exception) -> Outcome:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == idiom.path]
    line = frames[-1].lineno if frames else None
    source = (frames[-1].line or "") if frames else ""
    message = " ".join(str(error).split())[:400]
    for text, remedy in THEIR_REFUSALS.items():
        if text in message:
            return Outcome(REFUSED, f"{type(error).__name__}: {message}. {remedy}", line, source)
    if not isinstance(error, zerostd.ZerostdError):
        return Outcome(ERROR, f"{type(error).__name__}: {message}", line, source, type(error).__name__)
    is_late = not any(_may_refuse(idiom, frame.lineno or 0, frame.line or "") for frame in frames)
    if is_late and idiom.name not in SEEN_LATER:
        return Outcome(ERROR, f"refused late: {message}", line, source)
    is_failure = isinstance(error, zerostd.CommunicationError | zerostd.StorageError)
    if is_failure or not REMEDY.search(message):
        return Outcome(ERROR, f"refused without a remedy: {message}", line, source)
    return Outcome(REFUSED, message, line, source)


def _may_refuse(idiom: Idiom, line: int, source: str) -> bool:
    if "loop.prepare" in source or line in _active_lines(idiom.path):
        return True
    return visible_effect(idiom.name) is None and not LATE.search(source)


@functools.cache
def _active_lines(path: str) -> set[int]:
    """The lines of a file that depend on `loop.active`."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.IfExp) and "loop.active" in ast.unparse(node.test)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _error(value: Any, expected: Any, tolerance: float) -> float:
    """How far a value is from what plain torch gives, in the way that the tolerance asks for."""
    if not isinstance(expected, Tensor):
        return 0.0 if type(value) is type(expected) and value == expected else float("inf")
    if not isinstance(value, Tensor) or value.shape != expected.shape:
        return float("inf")
    value, expected = value.cpu(), expected.cpu()
    if not expected.is_floating_point() or not expected.numel():
        return 0.0 if torch.equal(value, expected) else float("inf")
    if torch.equal(value.isnan(), expected.isnan()):
        value, expected = value.nan_to_num(), expected.nan_to_num()
    if tolerance == ROUNDED:  # of the whole tensor: single numbers near zero may be rounded to anything
        distance = (value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-3)
        return float(distance) if distance < float("inf") else float("inf")
    error = relative_error(value, expected)
    return error if value.dtype == expected.dtype else float("inf")


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(f"{path}.{key}".lstrip("."), part)
    elif isinstance(value, (list, tuple)):
        for key, part in enumerate(value):
            yield from _leaves(f"{path}.{key}".lstrip("."), part)
    elif isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, float):
        yield path, torch.tensor(value, dtype=torch.float64)
    else:
        yield path, value


# -- outside: the processes --


class Runner:
    """The processes that idioms run in."""

    def __init__(self) -> None:
        self._pools = {1: RankPool(1, grouped=False), 2: RankPool(2)}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def effect(self, name: str) -> float | None:
        """See `visible_effect`."""
        return self._pools[1].run(_visible_effect, name)[0]

    def outcome(self, name: str, form: Form, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Run one idiom in one form, on all its ranks, which wait for each other for so long."""
        pool = self._pools[form.num_ranks]
        try:
            outcomes = [Outcome(**parts) for parts in pool.run(try_idiom, name, form.name, timeout_s, timeout=60)]
        except AssertionError as error:
            return Outcome(ERROR, f"the process died or hung: {str(error)[-300:]}")
        if len({(outcome.outcome, outcome.line) for outcome in outcomes}) == 1:
            return outcomes[0]
        pool.close()
        first = next(outcome for outcome in outcomes if outcome.outcome != SAME)
        kinds = ", ".join(outcome.outcome for outcome in outcomes)
        outcome = DIFFERENT if {outcome.outcome for outcome in outcomes} == {SAME, DIFFERENT} else ERROR
        return Outcome(outcome, f"ranks differ ({kinds}): {first.detail}", first.line, first.source)


def _visible_effect(rank: int, name: str) -> float | None:
    return visible_effect(name)
