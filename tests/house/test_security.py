"""Data is never executed: nothing unpickles, evaluates or runs what it reads, but for the places named here."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from house.sources import ROOT, SOURCES, Source, hold, sample

FORBIDDEN = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("yaml.load", "yaml.unsafe_load", "eval", "exec", "compile", "os.system", "os.popen"),
}
ALLOWED = {
    "integrations/lightning.py": "its checkpoints hold what callbacks gave, and Lightning itself unpickles them",
    "replanning/ranking.py": "a process unpickles what the process that has started it sends through a pipe",
}


def dotted(node: ast.expr) -> str:
    """Return the name of what is called: "torch.load"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def executions(source: Source) -> Iterator[str]:
    """Yield every call that would execute data."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name == "torch.load":
            safe = [word.value for word in node.keywords if word.arg == "weights_only"]
            if not (safe and isinstance(safe[0], ast.Constant) and safe[0].value is True):
                yield f"{source.at(node.lineno)}: torch.load without weights_only=True"
        elif name in FORBIDDEN:
            yield f"{source.at(node.lineno)}: {name}"
        elif any(word.arg == "shell" and getattr(word.value, "value", None) is True for word in node.keywords):
            yield f"{source.at(node.lineno)}: {name} through a shell"


def test_nothing_executes_data() -> None:
    hold(finding for source in SOURCES if source.name not in ALLOWED for finding in executions(source))


def test_allowed_files_still_need_it() -> None:
    hold(
        f"{source.name} executes nothing any more: take it from the list"
        for source in SOURCES
        if source.name in ALLOWED and not [*executions(source)]
    )


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import pickle\npickle.loads(data)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_check_sees(text: str) -> None:
    assert [*executions(sample(text))]


def test_the_check_lets_safe_loads_pass() -> None:
    assert not [*executions(sample("torch.load(path, weights_only=True)\nre.compile(text)\njson.loads(text)"))]


def test_make_audit_asks_for_known_faults_of_what_is_installed() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    command = [make, "--no-print-directory", "--dry-run", "--assume-old=.venv/.developing", "audit"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ".venv/bin/pip-audit --skip-editable"
