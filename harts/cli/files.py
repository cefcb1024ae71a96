"""Commands on dumped values, and on the registry."""

from __future__ import annotations

from argparse import Namespace

from harts.cli.output import result
from harts.explain import registered, render_registered
from harts.ir.codec import load
from harts.ir.graph import dot
from harts.ir.text import diff_values, format_value


def inspect(given: Namespace) -> int:
    """`harts inspect`."""
    value = load(given.dump)
    report = {"kind": value.kind, "version": value.version, "digest": value.digest()}
    if given.digest:
        text = value.digest()
    elif given.dot:
        report["dot"] = text = dot(value)
    else:
        report["text"] = text = format_value(value, given.limit or None)
    result(report, text, given.json)
    return 0


def diff(given: Namespace) -> int:
    """`harts diff`: 1 if the values differ."""
    found = diff_values(load(given.first), load(given.second))
    result({"equal": not found, "differences": found}, "\n".join(found) or "equal", given.json)
    return 1 if found else 0


def backends(given: Namespace) -> int:
    """`harts backends`."""
    report = registered()
    result(report, render_registered(report), given.json)
    return 0
