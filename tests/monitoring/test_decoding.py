"""JSON into typed objects: what is wrong is named by field, value and remedy."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from msgspec import Meta

from zerostd.errors import CheckpointError, PrepareError
from zerostd.monitoring.decoding import convert, decode
from zerostd.policy import Tier


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 1.0


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    list_of: tuple[Inner, ...] = ()
    by_tier: Mapping[Tier, float] | None = None
    by_number: Mapping[int, Inner] | None = None


def read(data: Any) -> Outer:
    return decode(json.dumps(data), Outer, what="a.json", error=PrepareError, remedy="write it again")


def test_dataclasses_enums_and_numbers_as_keys_are_read() -> None:
    data = {"name": "a", "list_of": [{"size": 1}], "by_tier": {"host": 2}, "by_number": {"7": {"size": 3, "rate": 4}}}
    assert read(data) == Outer("a", None, (Inner(1),), {Tier.HOST: 2.0}, {7: Inner(3, 4.0)})


def test_numbers_that_json_writes_but_does_not_define_are_read() -> None:
    assert math.isnan(decode("[NaN]", list[float], what="a.json", error=PrepareError)[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 7}, "name is 7, but must be a string"),
        ({"inner": {"size": 1.5}}, "inner.size is 1.5, but must be a whole number"),
        ({"inner": 5}, "inner is 5, but must be an object or null"),
        ({"list_of": [{"size": 1}, {"size": "x"}]}, "list_of.1.size is 'x', but must be a whole number"),
        ({"list_of": "x"}, "list_of is 'x', but must be a list"),
        ({"by_number": {"7": {"size": 3}, "8": {"size": None}}}, "by_number.8.size is None"),
        ({"by_number": {"x": {"size": 3}}}, "by_number is {'x': {'size': 3}}, but every key must be a whole number"),
        ({"by_tier": {"attic": 1}}, "by_tier: Invalid enum value 'attic'"),
        ({"inner": {}}, "inner: the field 'size' is missing"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PrepareError) as caught:
        read({"name": "a", **changes})
    assert str(caught.value).startswith(f"a.json: {said}") and str(caught.value).endswith("; write it again")


@pytest.mark.parametrize(
    ("meta", "number"),
    [
        (Meta(lt=2**62), 2**62),
        (Meta(le=2**63 - 1), 2**63),
        (Meta(ge=-(2**62) + 1), -(2**62)),
        (Meta(gt=0.5), 0.5),
        (Meta(lt=1e300), math.inf),
    ],
    ids=repr,
)
def test_the_number_that_is_out_of_range_is_named_however_close(meta: Meta, number: float) -> None:
    kind: Any = dict[str, Annotated[type(number), meta]]
    with pytest.raises(PrepareError, match=rf"^a\.json: b is {re.escape(reprlib.repr(number))}: Expected"):
        convert({"a": 1, "b": number, "c": 1}, kind, what="a.json", error=PrepareError)


def test_text_that_is_not_json_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"^a\.json is not JSON \(Expecting"):
        decode("{", Outer, what="a.json", error=CheckpointError)


@pytest.mark.parametrize("place", [{}, {"inner": {"size": 1}}, {"list_of": [{"size": 1}]}], ids=str)
def test_unknown_fields_are_ignored_or_refused_by_name(place: dict[str, Any]) -> None:
    data: Any = {"name": "a", **place}
    target = data.get("inner") or data.get("list_of", [data])[0]
    target["speed"] = 2
    assert convert(data, Outer, what="a.json", error=PrepareError).name == "a"
    with pytest.raises(PrepareError, match=r"(Inner|Outer) has no field 'speed'; its fields are (size|name), "):
        convert(data, Outer, what="a.json", error=PrepareError, refuse_unknown=True)
