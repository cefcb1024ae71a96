"""Text of results: shapes and statistics, never the values themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from harts.ir.base import Value, as_numpy
from harts.ir.text.pieces import statistics, wrapped


def fields_of(value: Value) -> Iterator[str]:
    """One line a field: shape, dtype and statistics of arrays and tensors, the kind of held values, scalars as such."""
    yield f"{value.kind} v{value.version}"
    for field in fields(value):
        yield from wrapped(2, [f"{field.name}:", _described(getattr(value, field.name))])


def _described(item: Any) -> str:
    if isinstance(item, np.ndarray) or hasattr(item, "detach"):
        array = as_numpy(item)
        return f"{array.dtype}[{', '.join(map(str, array.shape))}], {statistics(array)}"
    if isinstance(item, Value):
        return item.kind
    if isinstance(item, tuple):
        return f"{len(item)} items"
    return "absent" if item is None else repr(item)
