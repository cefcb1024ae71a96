"""Small pieces of text: words, runs, statistics, wrapped lines and tables. The same input gives the same text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 116
"""Columns after which a line is continued on the next one."""


def word(name: str) -> str:
    """A name as it is, or quoted where it would not read as one word."""
    plain = name.isprintable() and name and not any(sign in name for sign in ' ",')
    return name if plain else json.dumps(name)


def wrapped(indent: int, words: Iterable[str]) -> Iterator[str]:
    """Lines of the words, separated by one space; continuation lines are indented by four more."""
    line = " " * indent
    empty = True
    for each in words:
        if not empty and len(line) + 1 + len(each) > WIDTH:
            yield line
            line, empty = " " * (indent + 4), True
        line += each if empty else " " + each
        empty = False
    yield line


def spans(values: NDArray[Any]) -> list[str]:
    """Runs of consecutive integers as `first:past`."""
    if len(values) == 0:
        return []
    cuts = np.flatnonzero(np.diff(values) != 1) + 1
    first = values[np.concatenate(([0], cuts))].tolist()
    last = values[np.concatenate((cuts, [len(values)])) - 1].tolist()
    return [f"{a}:{b + 1}" for a, b in zip(first, last, strict=True)]


def repeats(values: NDArray[Any]) -> list[str]:
    """Runs of equal values as `value*count`."""
    if len(values) == 0:
        return []
    cuts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1, [len(values)]))
    heads, counts = values[cuts[:-1]].tolist(), np.diff(cuts).tolist()
    return [f"{head}*{count}" for head, count in zip(heads, counts, strict=True)]


def statistics(array: NDArray[Any]) -> str:
    """Least, mean and greatest of the finite entries, and how many are not finite; how many are true of a mask."""
    if array.dtype == np.bool_:
        return f"true {int(array.sum())} of {array.size}"
    finite = array[np.isfinite(array)] if array.dtype.kind in "fc" else array
    odd = array.size - finite.size
    tail = f", not finite {odd}" if odd else ""
    if finite.size == 0:
        return "empty" if not odd else f"not finite {odd}"
    mean = finite.mean(dtype=np.float64)
    return f"min {number(finite.min())}, mean {number(mean)}, max {number(finite.max())}{tail}"


def number(value: Any) -> str:
    """An integer in full, a float with six digits and no negative zero."""
    return str(int(value)) if isinstance(value, int | np.integer) else f"{float(value) + 0.0:.6g}"


def table(indent: int, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Columns two spaces apart; numbers to the right, words to the left."""
    body = [[each if isinstance(each, str) else str(each) for each in row] for row in rows]
    columns = list(zip(head, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell.lstrip("-").isdigit() for cell in column[1:]) for column in columns]
    for row in [list(head), *body]:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        yield (" " * indent + "  ".join(cells)).rstrip()
