"""Habits that make code hard to follow: functions that are set later, packed assignments, arguments hidden in dicts,
private names of others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house.limits import (
    MOST_HIDDEN_ARGUMENTS,
    MOST_LATE_FUNCTIONS,
    MOST_PACKED_ASSIGNMENTS,
    MOST_PRIVATE_NAMES,
    MOST_REACHES,
)
from house.sources import SOURCES, Function, Source, hold, hold_everywhere, sample

# "room/file.py: target": why a function may be set there on an object of somebody else's.
LATE_FUNCTIONS: dict[str, str] = {
    "integrations/keras.py: model.__dict__[name]": "the user's model: a method of it needs whole parameters",
    "integrations/keras.py: model.__dict__['load_weights']": "the user's model: a method of it knows about shards",
    "integrations/keras.py: model.__dict__['save_weights']": "the user's model: a method of it knows about shards",
    "integrations/lightning.py: plugin.clip_grad_by_norm": "Lightning's plugin, which clips by torch's own functions",
    "integrations/lightning.py: plugin.clip_grad_by_value": "Lightning's plugin, which clips by torch's own functions",
    "compat.py: init._no_grad_trunc_normal_": "torch's own, for as long as `empty_init` is on",
    "scheduling/guards.py: module.__dict__['_apply']": "the user's module: `.to()` and the like are refused",
    "scheduling/guards.py: module.__dict__[GUARD]": "the user's module: a copy of it is refused",
    "scheduling/recomputing.py: module.forward": "the user's module: its forward is what is recomputed",
}

# Private names of torch that may stand outside compat.py, with the reason.
TABLES = "torch's table of a module: named_parameters() and the like cannot replace an entry or show it twice"
DOCUMENTED = "torch documents it under this name, for everybody who extends torch"
PRIVATE_NAMES: dict[str, str] = {
    "_parameters": TABLES,
    "_buffers": TABLES,
    "_modules": TABLES,
    "torch.utils._python_dispatch.TorchDispatchMode": DOCUMENTED,
    "torch.utils._pytree.tree_leaves": DOCUMENTED,
    "torch.utils._pytree.tree_map": DOCUMENTED,
    "torch.Tensor._make_wrapper_subclass": DOCUMENTED,
    "torch.ops.aten._cudnn_rnn": "an operator: its name is what a trace of a model shows",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "an operator, as above",
    "aten._amp_foreach_non_finite_check_and_unscale_": "an operator, as above",
}

OURS = ("self", "cls")
SPARED = (*OURS, "super()", "sys", "os")  # whose private names are no matter of torch's
PRIVATE = re.compile(r"_(?!_)")


def test_no_function_is_set_later() -> None:
    """What an object calls, it was given when it was made, or is a method of an object that it was given."""

    def late(source: Source) -> Iterator[str]:
        for line, target, value in _late_functions(source):
            if f"{source.name}: {target}" not in LATE_FUNCTIONS:
                yield f"{source.at(line)}: {target} = {value}"

    hold_everywhere(late, MOST_LATE_FUNCTIONS)
    needed = {f"{source.name}: {target}" for source in SOURCES for _, target, _ in _late_functions(source)}
    hold(f"LATE_FUNCTIONS: {name} is not needed any more" for name in LATE_FUNCTIONS.keys() - needed)


def test_one_assignment_a_line() -> None:
    """Two values that change places, and one value that is taken apart, are no two assignments."""

    def packed(source: Source) -> Iterator[str]:
        for line, text in _packed(source):
            yield f"{source.at(line)}: {text}"

    hold_everywhere(packed, MOST_PACKED_ASSIGNMENTS)


def test_arguments_are_named() -> None:
    """No `**kwargs` that the function reads by name, and no dict that is made only to be splatted."""

    def hidden(source: Source) -> Iterator[str]:
        for name, function in source.definitions:
            if isinstance(function, Function):
                for what in sorted({*_read_by_name(function), *_only_splatted(function)}):
                    yield f"{source.at(function.lineno)}: {name}: {what}"

    hold_everywhere(hidden, MOST_HIDDEN_ARGUMENTS)


def test_private_names_of_torch_are_in_compat() -> None:
    def private(source: Source) -> Iterator[str]:
        if source.name != "compat.py":
            for line, name in _private_names(source):
                if not _is_excepted(name):
                    yield f"{source.at(line)}: {name}"

    hold_everywhere(private, MOST_PRIVATE_NAMES)
    used = {name for source in SOURCES for _, name in _private_names(source)}
    unused = [name for name in PRIVATE_NAMES if not any(name in (text, text.split(".")[-1]) for text in used)]
    hold(f"PRIVATE_NAMES: {name} is not needed any more" for name in unused)


def test_private_names_of_ours_stay_in_their_file() -> None:
    """What begins with an underscore is read in the file that defines it; others ask for a public name."""

    def reaches(source: Source) -> Iterator[str]:
        own = _defined_privately(source)
        for node in _private_attributes(source):
            if node.attr in OUR_PRIVATE_NAMES and node.attr not in own:
                yield f"{source.at(node.lineno)}: {ast.unparse(node)}"

    hold_everywhere(reaches, MOST_REACHES)


LATE = """
def stop(): ...
class Loop:
    def __init__(self, on_begin, on_end):
        self.on_begin = on_begin
        self.on_end = on_end or stop
        self.on_step: Callable[[], None] | None = None
        self.on_stop = lambda: None
        self.count = 0
    def begin(self, stop):
        self.stop = stop
        self.again = self.begin
def wire(loop):
    loop.on_begin = stop
    loop.on_end = functools.partial(stop, 1)
    loop.__dict__["on_step"] = loop.begin
    loop.on_step = loop
    loop.count = loop.count + 1
"""
PACKED = """
a, b = b, a
a, b = f()
a, b = 1, 2
(a, b), c = f(), 2
x.a, y[0] = [1, 2]
"""
HIDDEN = """
def reads(**more):
    return more["step"], more.get("way")
def passes(**more):
    return reads(**more)
def splats(x):
    options = {"x": x}
    more = dict(x=x)
    more.pop("x")
    return reads(**options), reads(**more)
"""
PRIVATE_USES = """
from torch.utils._pytree import tree_map
from torch._dynamo import disable
from zerostd.tiers import _nothing
class Own:
    def __init__(self, tensor):
        self._version = tensor._version_of_torch
        self.size = torch._C._of_torch() + sys._getframe().f_lineno
"""


def test_checks_find_what_they_are_for() -> None:
    """All of these lists may be empty for the library one day; the checks have to see something all the same."""
    assert [line for line, _, _ in _late_functions(sample(LATE))] == [7, 8, 12, 14, 15, 16, 17]
    assert [line for line, _ in _packed(sample(PACKED))] == [4, 5, 6]
    functions = [node for _, node in sample(HIDDEN).definitions if isinstance(node, Function)]
    assert [sorted({*_read_by_name(node), *_only_splatted(node)}) for node in functions] == [
        ["more.get('way')", "more['step']"],
        [],
        ["**options"],
    ]
    assert [name for _, name in _private_names(sample(PRIVATE_USES)) if not _is_excepted(name)] == [
        "torch._dynamo.disable",
        "tensor._version_of_torch",
        "torch._C._of_torch",
        "torch._C",
    ]


def _late_functions(source: Source) -> Iterator[tuple[int, str, str]]:
    """(line, target, value) of the functions that are set on another object, or on one's own after it was made."""
    functions = _plain_functions(source)
    methods = ONLY_METHODS | _only_methods([source])
    callables = CALLABLES | _callables([source])
    for node, within in _assignments(source.tree, None):
        given = _parameters(within)
        for target, value in _pairs(node):
            if not _is_on_an_object(target):
                continue
            if not _is_own(target):
                late = _is_function(value, functions - given, methods) or _attribute(target) in callables
            elif within is None or within.name != "__init__":
                late = _is_function(value, functions - given, methods)
            else:
                is_empty = isinstance(value, ast.Constant) and _attribute(target) in callables
                late = not _names(value) & given - set(OURS) and (is_empty or _is_function(value, functions, set()))
            if late:
                yield node.lineno, ast.unparse(target), ast.unparse(value)


def _assignments(
    tree: ast.AST, within: Function | None
) -> Iterator[tuple[ast.Assign | ast.AnnAssign, Function | None]]:
    """Every assignment, and the function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield node, within
        yield from _assignments(node, node if isinstance(node, Function) else within)


def _parameters(function: Function | None) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)} if function else set()


def _pairs(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and their values; packed ones by twos."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List):
            yield from zip(target.elts, node.value.elts, strict=False)
        elif node.value is not None:
            yield target, node.value


def _is_on_an_object(target: ast.expr) -> bool:
    match target:
        case ast.Attribute() | ast.Subscript(value=ast.Attribute(attr="__dict__")):
            return True
    return False


def _is_own(target: ast.expr) -> bool:
    """`self.x` itself, not an attribute of it."""
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in OURS


def _attribute(target: ast.expr) -> str | None:
    return target.attr if isinstance(target, ast.Attribute) else None


def _names(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _is_function(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    """A lambda, a function of the file, a method of ours that is not called, a part of one, or a choice of these."""
    match value:
        case ast.Lambda():
            return True
        case ast.Name(id=name):
            return name in functions
        case ast.Attribute(attr=name):
            return name in methods
        case ast.Call(func=function, args=[ast.Name() | ast.Attribute() | ast.Lambda(), *_]):
            return ast.unparse(function).split(".")[-1] in ("partial", "no_dynamo", "MethodType", "wraps")
        case ast.BoolOp(values=values):
            return any(_is_function(choice, functions, methods) for choice in values)
        case ast.IfExp(body=first, orelse=second):
            return any(_is_function(choice, functions, methods) for choice in (first, second))
    return False


def _plain_functions(source: Source) -> set[str]:
    """Functions that are no methods: a bare name of one is the function."""
    methods = {method for node in source.nodes if isinstance(node, ast.ClassDef) for method in node.body}
    return {node.name for node in source.nodes if isinstance(node, Function) and node not in methods}


def _packed(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of assignments of several values to as many targets, but for those that change places."""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List) and _texts(target) != _texts(node.value):
                    yield node.lineno, ast.unparse(node)


def _texts(node: ast.Tuple | ast.List) -> set[str]:
    return {ast.unparse(element) for element in node.elts}


def _read_by_name(function: Function) -> Iterator[str]:
    """`kwargs["x"]`, `kwargs.get("x")`, `kwargs.pop("x")` of the function's own `**kwargs`."""
    if function.args.kwarg is None:
        return
    kwargs = function.args.kwarg.arg
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id=name)) if name == kwargs:
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop")) if name == kwargs:
                yield ast.unparse(node)


def _only_splatted(function: Function) -> Iterator[str]:
    """Local dicts whose every use is `**them`."""
    nodes = list(ast.walk(function))
    dicts = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target, value in _pairs(node)
        if isinstance(target, ast.Name) and _is_dict(value)
    }
    splatted = [
        keyword.value for node in nodes if isinstance(node, ast.Call) for keyword in node.keywords if not keyword.arg
    ]
    for name in sorted(dicts):
        uses = [
            node for node in nodes if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        ]
        if uses and all(use in splatted for use in uses):
            yield f"**{name}"


def _is_dict(value: ast.expr) -> bool:
    match value:
        case ast.Dict() | ast.Call(func=ast.Name(id="dict")):
            return True
    return False


def _private_names(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name) of what belongs to torch and begins with an underscore, imported or read from an object."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                if "._" in f".{node.module}.{alias.name}":
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in _private_attributes(source):
        if node.attr not in OUR_PRIVATE_NAMES:
            yield node.lineno, ast.unparse(node)


def _private_attributes(source: Source) -> Iterator[ast.Attribute]:
    """`x._name`, but of oneself, of a base class and of Python's own."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr) and ast.unparse(node.value) not in SPARED:
            yield node


def _is_excepted(name: str) -> bool:
    return name in PRIVATE_NAMES or name.split(".")[-1] in PRIVATE_NAMES


def _defined_privately(source: Source) -> set[str]:
    """Private names that the file's classes define: methods, fields, and what is set on `self`."""
    names: set[str] = set()
    for node in source.nodes:
        match node:
            case ast.ClassDef(body=body):
                names |= {member.name for member in body if isinstance(member, Function)}
                names |= {field.target.id for field in body if isinstance(field, ast.AnnAssign)}
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if name.startswith("_")}


OUR_PRIVATE_NAMES = {name for source in SOURCES for name in _defined_privately(source)} - PRIVATE_NAMES.keys()


def _only_methods(sources: list[Source]) -> set[str]:
    """Names that are methods of classes and nothing else in these files: no field, property or attribute."""
    methods: set[str] = set()
    others: set[str] = set()
    for source in sources:
        for node in source.nodes:
            match node:
                case ast.ClassDef(body=body):
                    functions = [member for member in body if isinstance(member, Function)]
                    properties = {
                        member.name
                        for member in functions
                        if any("property" in ast.unparse(decorator) for decorator in member.decorator_list)
                    }
                    methods |= {member.name for member in functions} - properties
                    others |= properties | {field.target.id for field in body if isinstance(field, ast.AnnAssign)}
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    others.add(name)
    return methods - others


ONLY_METHODS = _only_methods(SOURCES)


def _callables(sources: list[Source]) -> set[str]:
    """Attributes that some class annotates as a callable, by an alias too, and no other as something else."""
    aliases = {
        target.id
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    is_callable = re.compile(rf"(?:{'|'.join(['Callable', *sorted(aliases)])})\b")
    callables: set[str] = set()
    others: set[str] = set()
    for source in sources:
        for node in source.nodes:
            match node:
                case ast.AnnAssign(target=ast.Attribute(attr=name)):
                    (callables if is_callable.match(ast.unparse(node.annotation)) else others).add(name)
                case ast.ClassDef(body=body):
                    for field in body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            is_one = is_callable.match(ast.unparse(field.annotation))
                            (callables if is_one else others).add(field.target.id)
    return callables - others


CALLABLES = _callables(SOURCES)
