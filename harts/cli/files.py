"""Commands on dumped values, and on the registry."""

from __future__ import annotations

from argparse import Namespace

from harts.cli.output import result
from harts.errors import InputError
from harts.explain import registered, render_registered
from harts.ir import CompactLayout, PerMicrobatch, Value
from harts.ir.codec import load
from harts.ir.diff import diff as differences
from harts.ir.diff import format_diff
from harts.ir.text import format_value


def inspect(given: Namespace) -> int:
    """`harts inspect`."""
    value = _item(load(given.dump), given.item)
    report = {"kind": value.kind, "version": value.version, "digest": value.digest()}
    if given.digest:
        text = value.digest()
    elif given.dot:
        from harts.ir.graph import to_dot  # noqa: PLC0415  (networkx takes a third of a second)

        report["dot"] = text = to_dot(value.plan if isinstance(value, CompactLayout) else value)
    else:
        report["text"] = text = format_value(value, given.limit or None)
    result(report, text, given.json)
    return 0


def _item(value: Value, index: int | None) -> Value:
    if index is None:
        return value
    if not isinstance(value, PerMicrobatch):
        raise InputError(f"--item {index}: a {value.kind} is not one value a microbatch")
    if not 0 <= index < len(value):
        raise InputError(f"--item {index}: there are {len(value)} microbatches, numbered from 0")
    item: Value = value.items[index]
    return item


def diff(given: Namespace) -> int:
    """`harts diff`: 1 if the values differ."""
    found = differences(load(given.first), load(given.second), given.tolerance)
    report = {"equal": not found, "differences": [str(each) for each in found]}
    result(report, format_diff(found, given.limit or None), given.json)
    return 1 if found else 0


def backends(given: Namespace) -> int:
    """`harts backends`."""
    report = registered()
    result(report, render_registered(report), given.json)
    return 0
