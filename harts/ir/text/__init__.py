"""Deterministic text of every kind of value, made for a person to read; golden tests compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from harts.ir.base import Value
from harts.ir.step_plan import PerMicrobatch
from harts.ir.text import microbatch, step
from harts.ir.text.outputs import fields_of

__all__ = ["format_value"]


def format_value(value: Value, limit: int | None = None) -> str:
    """The text of a value, without those it was made from.

    Args:
        value: a value of any kind; a kind without a text of its own is listed field by field.
        limit: lines at most; the rest is counted in one more line. None is no limit.
    """
    lines = _lines(value)
    if limit is None:
        return "\n".join(lines)
    shown = list(islice(lines, limit))
    left = sum(1 for _ in lines)
    if left:
        shown.append(f"... {left} more lines")
    return "\n".join(shown)


def _lines(value: Value) -> Iterator[str]:
    return _TEXTS.get(value.kind, fields_of)(value)


def _per_microbatch(value: PerMicrobatch[Value]) -> Iterator[str]:
    yield f"per_microbatch v{value.version}  items={len(value)}"
    yield from ("  " + line for line in _lines(value.step))
    for k, item in enumerate(value.items):
        yield f"  item {k}"
        yield from ("    " + line for line in _lines(item))


_TEXTS: dict[str, Callable[[Any], Iterator[str]]] = {
    "columns": step.columns,
    "compact_layout": microbatch.compact_layout,
    "compact_trie": step.compact_trie,
    "partitions": step.partitions,
    "per_microbatch": _per_microbatch,
    "rollout_batch": step.rollout_batch,
    "round_plan": microbatch.round_plan,
    "segment_tree": microbatch.segment_tree,
    "semantic_map": microbatch.semantic_map,
    "step_plan": step.step_plan,
}
