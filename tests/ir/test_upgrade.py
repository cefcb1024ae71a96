"""Older versions of a made-up kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any

import numpy as np
import pytest

from harts.errors import CodecError
from harts.ir import Value
from harts.ir.base import Dims, Int64
from harts.ir.codec import decode, encode
from harts.ir.text import format_value
from harts.ir.upgrade import upgraded, upgrades
from tests.ir import cases


def first_version() -> type[Value]:
    @dataclass(frozen=True, eq=False)
    class Weather(Value):
        kind = "weather"
        degrees: Annotated[Int64, Dims("N")]
        place: str

    return Weather


def third_version() -> type[Value]:
    @dataclass(frozen=True, eq=False)
    class Weather(Value):
        kind = "weather"
        version = 3
        kelvin: Annotated[Int64, Dims("N")]
        town: str
        hours: int

    return Weather


@pytest.fixture
def old_bytes() -> Iterator[bytes]:
    """Bytes of the first version, while the third one is current."""
    cls: Any = first_version()
    data = encode(cls(np.array([20, -3]), "Here"))
    del Value.kinds["weather"]
    third_version()
    yield data
    del Value.kinds["weather"]


def to_two(fields: dict[str, Any]) -> dict[str, Any]:
    rest = {name: item for name, item in fields.items() if name != "degrees"}
    return rest | {"kelvin": fields["degrees"] + 273}


def to_three(fields: dict[str, Any]) -> dict[str, Any]:
    return {"kelvin": fields["kelvin"], "town": fields["place"], "hours": 24}


def test_an_older_value_is_upgraded_step_by_step(old_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upgrades, ("weather", 1), to_two)
    monkeypatch.setitem(upgrades, ("weather", 2), to_three)
    value: Any = decode(old_bytes)
    assert value.kelvin.tolist() == [293, 270]
    assert (value.town, value.hours) == ("Here", 24)
    assert decode(encode(value)).digest() == value.digest()


def test_a_step_that_is_missing_is_refused(old_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upgrades, ("weather", 1), to_two)
    with pytest.raises(CodecError, match=r"weather v1 is older than what this release reads \(v3 and later\)"):
        decode(old_bytes)


def test_an_upgrade_that_gives_wrong_fields_is_refused(old_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upgrades, ("weather", 1), to_two)
    monkeypatch.setitem(upgrades, ("weather", 2), lambda fields: fields)
    with pytest.raises(CodecError, match="weather v3: has no town, has no hours, has an unknown field place"):
        decode(old_bytes)


def test_every_upgrade_is_of_a_known_kind_and_an_older_version() -> None:
    assert all(version < Value.kinds[kind].version for kind, version in upgrades)


def test_a_kind_without_text_of_its_own_is_listed_field_by_field(old_bytes: bytes) -> None:
    cls: Any = Value.kinds["weather"]
    text = format_value(cls(np.array([293, 270]), "Here", 24))
    assert text == "weather v3\n  kelvin: int64[2], min 270, mean 281.5, max 293\n  town: 'Here'\n  hours: 24"


@pytest.mark.parametrize("kind", ["partitions", "step_plan"])
def test_plans_of_the_first_version_get_costs_and_a_weaker_bound(kind: str) -> None:
    value: Any = cases.partitions() if kind == "partitions" else cases.step()
    fields = {field.name: getattr(value, field.name) for field in dataclass_fields(value)}
    added = ("objective", "unit", "lower_bound", "cost")
    old = {name: item for name, item in fields.items() if name not in added}
    found = type(value)(**upgraded(type(value), 1, old))
    found.verify()
    assert (found.objective, found.unit, found.lower_bound) == ("paper", "compact tokens", 95)
    assert found.cost.tolist() == value.cost.tolist()
