"""The rooms and who may import whom, as data; and what no file may do when it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter

from house.sources import SOURCES, Function, Source, hold, hold_everywhere

GROUND = {"errors", "policy", "compat"}  # words, exceptions and torch's private names: open to every room but kernels
PUBLIC = "public names"  # what `zerostd/__init__.py` exports

# Room: the rooms it may import, besides itself. Rooms stand in the order the data passes, and a row names only rooms
# above it. "planning.plan" opens one file of a room.
CORE = {"monitoring", "sharding", "kernels", "tiers", "communication", "parameters", "scheduling", "optimizers"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "compat": set(),
    "policy": {"errors"},
    "monitoring": GROUND,
    "sharding": GROUND,
    "kernels": set(),
    "tiers": GROUND | {"kernels", "monitoring"},
    "communication": GROUND | {"sharding", "kernels", "monitoring", "tiers"},
    "parameters": GROUND | {"sharding", "kernels", "tiers", "communication", "monitoring"},
    "scheduling": GROUND | {"parameters", "tiers", "communication", "monitoring"},
    "optimizers": GROUND | {"parameters", "sharding", "tiers", "communication", "kernels", "monitoring"},
    "planning": GROUND | {"sharding", "monitoring"},
    "measuring": GROUND
    | {"planning", "optimizers", "parameters", "communication", "tiers", "kernels", "sharding", "monitoring"},
    "engine": GROUND | CORE | {"planning"},
    "preparing": GROUND | CORE | {"planning", "measuring", "engine"},
    "replanning": GROUND | CORE | {"planning", "measuring", "engine", "preparing"},
    "checkpointing": GROUND | CORE | {"engine"},
    "inference": GROUND | CORE | {"planning", "measuring", "engine", "preparing", "checkpointing"},
    "serving": GROUND | CORE | {"engine", "checkpointing"},
    "reporting": GROUND | {"monitoring", "parameters", "planning.plan", "measuring.identity", "engine"},
    "api": GROUND | CORE | {"planning", "measuring", "engine", "preparing", "replanning", "checkpointing", "serving"},
    "__init__": GROUND
    | {"monitoring", "planning", "measuring", "parameters", "engine", "checkpointing", "inference", "reporting", "api"}
    | {"tiers"},
    "integrations": {PUBLIC},
    "horovod": {PUBLIC},
    "cli": GROUND
    | {"api", "planning", "measuring", "reporting", "checkpointing", "communication", "tiers", "kernels", "monitoring"}
    | {"engine.settings", "preparing.scaling"}
    | {PUBLIC},
    "__main__": {"cli"},
}
# The only rooms that may import torch.distributed: ours, another's names, and the private names of torch.
SAYS_DIST = {"communication", "compat", "horovod"}
# Files that use torch.distributed.checkpoint, which is a file format.
READS_DCP = {"checkpointing/dcp.py", "checkpointing/storage/dcp_files.py"}
STDLIB = sys.stdlib_module_names

# Files that do something when they are imported, with the reason; an entry that is not needed any more fails.
WORKS_AT_IMPORT: dict[str, str] = {
    "__main__.py": "python -m zerostd",
    "integrations/fabric.py": "Fabric finds strategies by name in its registry",
    "integrations/lightning.py": "Lightning finds strategies by name in its registry",
    "integrations/keras.py": "refuses at once where Keras does not run on torch",
}


def test_every_room_is_in_the_table() -> None:
    hold(f"{source.at(1)}: give {source.room} a row in ROOMS" for source in SOURCES if source.room not in ROOMS)


def test_every_row_of_the_table_is_a_room() -> None:
    """A row opens rooms and files that are there."""
    names = {source.room for source in SOURCES} | {
        source.name.removesuffix(".py").replace("/", ".") for source in SOURCES
    }
    hold(f"{room} is not there any more" for room in ROOMS if room not in names)
    hold(f"{room} opens {name}, which is not there" for room, row in ROOMS.items() for name in row - names - {PUBLIC})


def test_table_has_no_cycle() -> None:
    rows = {room: {name.split(".")[0] for name in row} - {PUBLIC} for room, row in ROOMS.items()}
    TopologicalSorter(rows).prepare()  # raises CycleError
    above: set[str] = set()
    for room, row in rows.items():
        assert row <= above, f"{room} imports rooms below it: {sorted(row - above)}"
        above.add(room)


def test_rooms_import_what_their_rows_allow() -> None:
    def closed(source: Source) -> Iterator[str]:
        allowed = ROOMS.get(source.room, set()) | {source.room}
        for line, name in _own_imports(source):
            if not _is_open(name, allowed):
                yield f"{source.at(line)}: {source.room} may not import {name or PUBLIC}"

    hold_everywhere(closed)


def test_only_communication_says_torch_distributed() -> None:
    def says_it(source: Source) -> Iterator[str]:
        for node in _walk_at_run_time(source.tree):
            if source.room not in SAYS_DIST and source.name not in READS_DCP and _says_distributed(node):
                yield f"{source.at(node.lineno)}: torch.distributed outside {', '.join(sorted(SAYS_DIST))}"

    hold_everywhere(says_it)


def test_kernels_know_only_torch() -> None:
    known = STDLIB | {"torch", "triton", "zerostd"}

    def foreign(source: Source) -> Iterator[str]:
        for line, name in _imports(source):
            if source.room == "kernels" and name.split(".")[0] not in known:
                yield f"{source.at(line)}: {name}"

    hold_everywhere(foreign)


def test_no_star_import_and_no_global() -> None:
    def wrong(source: Source) -> Iterator[str]:
        for node in source.nodes:
            if isinstance(node, ast.Global):
                yield f"{source.at(node.lineno)}: global {', '.join(node.names)}"
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                yield f"{source.at(node.lineno)}: import *"

    hold_everywhere(wrong)


def test_no_work_at_import() -> None:
    """Files define, and assign what they compute from literals and definitions; they start nothing."""

    def works(source: Source) -> Iterator[str]:
        for node in _work_at_import(source):
            if source.name not in WORKS_AT_IMPORT:
                yield f"{source.at(node.lineno)}: {ast.unparse(node).splitlines()[0]}"

    hold_everywhere(works)
    working = {source.name for source in SOURCES if any(_work_at_import(source))}
    hold(f"{name} does nothing at import any more" for name in WORKS_AT_IMPORT.keys() - working)


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` is a.b."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = source.package.split(".")
            start = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _own_imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name below zerostd) of the imports of our own: "planning.plan.Plan"; "" for `import zerostd`."""
    for line, name in _imports(source):
        if name.split(".")[0] == "zerostd":
            yield line, name.removeprefix("zerostd").removeprefix(".")


def _is_open(name: str, allowed: set[str]) -> bool:
    if name.split(".")[0] not in ROOMS:
        return PUBLIC in allowed
    return any(f"{name}.".startswith(f"{row}.") for row in allowed)


def _walk_at_run_time(tree: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Every statement and expression but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.orelse:
                yield statement
                yield from _walk_at_run_time(statement)
            continue
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        yield from _walk_at_run_time(node)


def _says_distributed(node: ast.stmt | ast.expr) -> bool:
    match node:
        case ast.Import(names=names):
            return any(f"{alias.name}.".startswith("torch.distributed.") for alias in names)
        case ast.ImportFrom(module="torch", level=0, names=names):
            return any(alias.name == "distributed" for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return f"{module}.".startswith("torch.distributed.")
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            return True
    return False


def _work_at_import(source: Source) -> Iterator[ast.stmt]:
    """Statements of the module itself that are no import, definition, assignment, docstring or import for types."""
    harmless = ast.Import | ast.ImportFrom | ast.ClassDef | Function | ast.Assign | ast.AnnAssign | ast.AugAssign
    for node in source.tree.body:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case _ if not isinstance(node, harmless):
                yield node
