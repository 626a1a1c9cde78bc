"""JSON into typed objects, or an error of ours that names the field, its value and the remedy.

In: JSON text or what a JSON parser made of it, and a type that msgspec knows: dataclasses, enums, mappings, tuples.
Out: an object of that type. Plans, machine profiles, checkpoints and recorded runs are read with it.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import operator
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from zerostd.errors import ZerostdError

T = TypeVar("T")

LONGEST_PATH = 4096  # characters
LONGEST = 256 * 2**20  # bytes of a document: a manifest of 100,000 tensors has 50 MB

JSON_NAMES = {dict: "object", list: "array", str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
WORDS = {
    "object": "an object",
    "array": "a list",
    "str": "a string",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def path_of(path: str | os.PathLike[str], what: str, error: type[ZerostdError]) -> Path:
    """Return a path that a user gave; raise `error` if it is something else. The system would take a number for a file
    descriptor, and close it."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\x00" in text or len(text) > LONGEST_PATH:
        raise error(
            f"{what}={reprlib.repr(path)} must be a path: a string that is not empty and has no null characters, or a "
            "pathlib.Path"
        )
    return Path(path)


def read_document(path: str | os.PathLike[str], *, what: str, error: type[ZerostdError], remedy: str = "") -> bytes:
    """Return the bytes of a file that holds a JSON document; raise `error` if it cannot be one. Reading a pipe or a
    device might never end, and no document is longer than LONGEST."""
    ending = f"; {remedy}" if remedy else ""
    path = path_of(path, what, error)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{what} is not a regular file{ending}")
        with open(path, "rb") as file:
            content = file.read(LONGEST + 1)
    except OSError as problem:
        raise error(f"{what} cannot be read: {problem.strerror}{ending}") from problem
    if len(content) > LONGEST:
        raise error(f"{what} has more than {LONGEST:,} bytes, too many for a zerostd document{ending}")
    return content


def decode(data: str | bytes, kind: type[T], *, what: str, error: type[ZerostdError], remedy: str = "") -> T:
    """Return JSON text as an object of type `kind`; raise `error` if it is none.

    NaN and Infinity, which `json` writes, are numbers here too. The error names the document, `what`, and what the user
    can do about it, the `remedy`.
    """
    try:
        value = json.loads(data)
    except (TypeError, ValueError, RecursionError) as problem:  # UnicodeDecodeError is a ValueError
        ending = f"; {remedy}" if remedy else ""
        reason = "nested too deeply" if isinstance(problem, RecursionError) else problem
        raise error(f"{what} is not JSON ({reason}){ending}") from problem
    return convert(value, kind, what=what, error=error, remedy=remedy)


def convert(
    value: Any, kind: type[T], *, what: str, error: type[ZerostdError], remedy: str = "", refuse_unknown: bool = False
) -> T:
    """Return parsed JSON as an object of type `kind`, as `decode` does. Fields that the dataclasses in `kind` do not
    have are ignored, or refused with `refuse_unknown`: in files that people write by hand they are typing errors."""
    ending = f"; {remedy}" if remedy else ""
    try:
        converted = msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as problem:
        raise error(f"{what}: {_explain(problem, value)}{ending}") from problem
    except RecursionError as problem:
        raise error(f"{what} is nested too deeply{ending}") from problem
    except UnicodeEncodeError as problem:
        raise error(f"{what} contains text that is not Unicode: {reprlib.repr(problem.object)}{ending}") from problem
    unknown = next(_unknown_fields(value, kind), None) if refuse_unknown else None
    if unknown is not None:
        raise error(f"{what}: {unknown}{ending}")
    return converted


def convert_given(value: Any, kind: Any, *, what: str, error: type[ZerostdError]) -> Any:
    """Return what a user's code passed as an object of type `kind`, as `convert` does: it may be written as in JSON."""
    try:
        plain = msgspec.to_builtins(value, enc_hook=_plain)
    except (TypeError, ValueError, RecursionError) as problem:  # keys that are no text are a ValueError
        raise error(f"{what}={reprlib.repr(value)} cannot be used: {problem}") from problem
    return convert(plain, kind, what=what, error=error)


def _plain(value: Any) -> int | float:
    """Return a number of numpy's as one of Python's."""
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(f"{type(value).__name__} is neither a number, nor a text, a list or a dict")


def _explain(problem: msgspec.ValidationError, value: Any) -> str:
    """Return what msgspec says, with names and values in place of its paths and types where they can be found."""
    said, place = [*str(problem).split(" - at ", 1), ""][:2]
    is_key = place.startswith("`key` in ")
    path = place.removeprefix("`key` in ").strip("`").removeprefix("$")
    types = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", said)
    if types is None:
        said = re.sub(r"Object missing required field `(.*)`", r"the field '\1' is missing", said)
        name = path.replace("[...]", ".*").strip(".")
        name, culprit = next(_outside(value, path, said), (name, None))
        shown = f"{name.strip('.')} is {reprlib.repr(culprit)}" if culprit is not None else name
        return f"{shown}: {said}" if shown else said
    got = "object" if is_key else types[2]
    culprits = (item for item in _values_at(value, path) if JSON_NAMES.get(type(item[1])) == got)
    name, culprit = next(culprits, (path, got))
    expected = " or ".join(WORDS.get(word, word) for word in types[1].split(" | "))
    which = "every key must be" if is_key else "must be"
    return f"{name.strip('.') or 'it'} is {reprlib.repr(culprit)}, but {which} {expected}"


def _outside(value: Any, path: str, said: str) -> Iterator[tuple[str, Any]]:
    """Yield the numbers at one of msgspec's paths that are outside the range that it expects."""
    limit = re.fullmatch(r"Expected `\w+` (>=|<=|>|<) (\S+)", said)
    if limit is not None:
        bound = json.loads(limit[2])  # a whole one exactly: as a float, 2**62 - 1 would be 2**62
        for name, number in _values_at(value, path):
            if isinstance(number, int | float) and not COMPARE[limit[1]](number, bound):
                yield name, number


def _values_at(value: Any, path: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each field at one of msgspec's paths, which do not tell the keys of mappings."""
    match = re.match(r"\[\.\.\.\]|\[(\d+)\]|\.([^.\[]+)", path)
    if match is None:
        yield name, value
        return
    items: Iterable[tuple[Any, Any]]
    if match[0] == "[...]":
        items = value.items() if isinstance(value, dict) else enumerate(value)
    else:
        key = match[2] if match[1] is None else int(match[1])
        items = [(key, value[key])]
    for key, item in items:
        yield from _values_at(item, path[match.end() :], f"{name}.{key}")


def _unknown_fields(value: Any, kind: Any) -> Iterator[str]:
    """Yield a sentence for each field that a dataclass does not have, wherever dataclasses stand in `kind`."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = [field.name for field in dataclasses.fields(kind)]
        for name, item in value.items():
            if name in known:
                yield from _unknown_fields(item, hints[name])
            else:
                yield f"{getattr(kind, '__name__', kind)} has no field {name!r}; its fields are {', '.join(known)}"
        return
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for argument in get_args(kind):
        for item in [value] if type(None) in get_args(kind) else items:
            yield from _unknown_fields(item, argument)
