"""One JSON value, array or tensor as a typed value of the IR. Nothing is converted that could change its meaning.

Every reader raises InputError with what is wrong, with numbers; the caller adds the place and the field.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.ir.base import Bool, Float64, Int32
from harts.stages.ingest import host

INT32_MAX = 2**31 - 1


def token_ids(value: Any) -> Int32:
    """Token ids, each from 0 to 2^31 - 1, [n]."""
    found = _array(value, "iu", (int,), "a token id (an integer)")
    bad = np.flatnonzero((found < 0) | (found > INT32_MAX))
    if bad.size:
        raise InputError(f"entry {bad[0]} is {found[bad[0]]}, a token id must be from 0 to {INT32_MAX}")
    return found.astype(np.int32)


def mask(value: Any) -> Bool:
    """A mask of integers 0 and 1 or of booleans, [n]. Floats are refused: a soft mask would be a weight."""
    found = _array(value, "biu", (int, bool), "0, 1, true or false")
    bad = np.flatnonzero((found != 0) & (found != 1))
    if bad.size:
        raise InputError(f"entry {bad[0]} is {found[bad[0]]}, must be 0, 1, true or false")
    return found.astype(np.bool_)


def floats(value: Any) -> Float64:
    """Numbers, NaN and infinities among them, [n]."""
    return _array(value, "iuf", (int, float), "a number").astype(np.float64)


def number(value: Any) -> float:
    """One number."""
    found = host.scalar(value)
    if not _fits(found, (int, float)):
        raise InputError(f"is {shown(value)}, must be a number")
    try:
        return float(found)
    except OverflowError:
        raise InputError("is too large for float64") from None


def count(value: Any) -> int:
    """An integer of at least 0."""
    found = host.scalar(value)
    if not _fits(found, (int,)) or found < 0:
        raise InputError(f"is {shown(value)}, must be an integer of at least 0")
    return int(found)


def flag(value: Any) -> bool:
    """A boolean."""
    found = host.scalar(value)
    if not isinstance(found, bool):
        raise InputError(f"is {shown(value)}, must be true or false")
    return found


def label(value: Any) -> str:
    """A name: text that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value:
        raise InputError(f"is {shown(value)}, must be text that is not empty")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InputError(f"is {shown(value)}, which holds a lone surrogate and cannot be written as UTF-8")
    return value


def spans(value: Any) -> list[tuple[int, int]]:
    """Half-open spans [start, end), nonempty, ascending, not overlapping."""
    if not isinstance(value, list | tuple):
        raise InputError(f"is {shown(value)}, must be a list of [start, end]")
    found: list[tuple[int, int]] = []
    last = 0
    for index, pair in enumerate(value):
        if not isinstance(pair, list | tuple) or [type(each) for each in pair] != [int, int]:
            raise InputError(f"entry {index} is {shown(pair)}, must be [start, end]")
        start, end = pair
        if not last <= start < end:
            raise InputError(f"entry {index} is [{start}, {end}], must not be empty and must start at {last} or later")
        found.append((start, end))
        last = end
    return found


def shown(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"


def _array(value: Any, kinds: str, types: tuple[type, ...], entry: str) -> NDArray[Any]:
    if isinstance(value, list | tuple):
        return _listed(value, types, entry)
    found = host.array(value)
    if found.ndim != 1:
        what = f"an array of shape {found.shape}" if found.ndim else shown(value)
        raise InputError(f"is {what}, must be a list; each entry {entry}")
    if found.dtype.kind not in kinds:
        raise InputError(f"has dtype {found.dtype}, each entry must be {entry}")
    return found


def _listed(value: Sequence[Any], types: tuple[type, ...], entry: str) -> NDArray[Any]:
    if not set(map(type, value)) <= set(types):  # at C speed; Python numbers need no closer look
        value = [host.scalar(each) for each in value]
        index = next((i for i, each in enumerate(value) if not _fits(each, types)), None)
        if index is not None:
            raise InputError(f"entry {index} is {shown(value[index])}, must be {entry}")
    dtype = np.float64 if float in types else np.int64
    try:
        return np.array(value, dtype=dtype)
    except OverflowError:
        index = max(range(len(value)), key=lambda i: int.bit_length(value[i]) if isinstance(value[i], int) else 0)
        raise InputError(f"entry {index} is {shown(value[index])}, too large for {dtype.__name__}") from None


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a scalar is one of the types, where int and float stand for all integers and all reals."""
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, numbers.Real if float in types else numbers.Integral)
