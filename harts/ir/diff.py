"""Every field in which two values differ, through all that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.ir.base import Bool, Value, as_numpy


@dataclass(frozen=True)
class Difference:
    """One field that differs; of an array, or a tuple of scalars, the first entry that does."""

    path: str
    """Such as `per_microbatch.items[3].tree.parent[17]`."""
    left: object
    right: object
    entries: int = 1
    """Entries of the field that differ."""
    total: int = 1
    """Entries of the field."""

    def __str__(self) -> str:
        count = f" ({self.entries} of {self.total} entries differ)" if self.total > 1 else ""
        return f"{self.path}: {self.left} != {self.right}{count}"


def diff(a: Value, b: Value, tolerance: float | None = None) -> list[Difference]:
    """All differing fields in field order; none if the values are equal.

    A pair of values that is met again on another path is reported once, on the first one.

    Args:
        a: the left value.
        b: the right value.
        tolerance: floats may differ by this much where they are below 1 and by this fraction of the larger one
            where they are above. None compares bits, except that every NaN equals every other.
    """
    return list(_Walk(tolerance).values(a.kind, a, b))


def format_diff(differences: Sequence[Difference], limit: int | None = None) -> str:
    """One line a difference, at most `limit` of them and how many were left out; `equal` if there are none."""
    if not differences:
        return "equal"
    shown = [str(each) for each in differences[:limit]]
    if len(shown) < len(differences):
        shown.append(f"... {len(differences) - len(shown)} more differences")
    return "\n".join(shown)


class _Walk:
    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.met: set[tuple[int, int]] = set()

    def values(self, path: str, a: Value, b: Value) -> Iterator[Difference]:
        if a is b or (id(a), id(b)) in self.met:
            return
        self.met.add((id(a), id(b)))
        if type(a) is not type(b):
            yield Difference(path, a.kind, b.kind)
            return
        for field in fields(a):
            yield from self.items(f"{path}.{field.name}", getattr(a, field.name), getattr(b, field.name))

    def items(self, path: str, a: Any, b: Any) -> Iterator[Difference]:
        a, b = _plain(a), _plain(b)
        if isinstance(a, Value) and isinstance(b, Value):
            yield from self.values(path, a, b)
        elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            yield from self.arrays(path, a, b)
        elif isinstance(a, tuple) and isinstance(b, tuple):
            yield from self.tuples(path, a, b)
        elif not self.same(a, b):
            yield Difference(path, _shown(a), _shown(b))

    def arrays(self, path: str, a: NDArray[Any], b: NDArray[Any]) -> Iterator[Difference]:
        if a.shape != b.shape or a.dtype != b.dtype:
            yield Difference(path, _shown(a), _shown(b))
            return
        differs = ~self.equal(a, b)
        count = int(np.count_nonzero(differs))
        if count:
            index = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), a.shape))
            where = f"[{', '.join(map(str, index))}]" if index else ""
            yield Difference(path + where, _shown(a[index].item()), _shown(b[index].item()), count, a.size)

    def tuples(self, path: str, a: tuple[Any, ...], b: tuple[Any, ...]) -> Iterator[Difference]:
        if len(a) != len(b):
            yield Difference(path, f"{len(a)} items", f"{len(b)} items")
        scalars = []
        for i, (left, right) in enumerate(zip(a, b, strict=False)):
            if isinstance(left, Value) and isinstance(right, Value):
                yield from self.values(f"{path}[{i}]", left, right)
            elif not self.same(left, right):
                scalars.append(i)
        if scalars:
            first = scalars[0]
            yield Difference(f"{path}[{first}]", _shown(a[first]), _shown(b[first]), len(scalars), min(len(a), len(b)))

    def same(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, float):
            return bool(self.equal(np.array(a), np.array(b)))
        return bool(a == b)

    def equal(self, a: NDArray[Any], b: NDArray[Any]) -> Bool:
        """Where two arrays of one shape and dtype are equal."""
        if a.dtype.kind != "f":
            return np.asarray(a == b)
        nan = np.isnan(a) & np.isnan(b)
        if self.tolerance is None:
            return np.asarray(nan | ((a == b) & (np.signbit(a) == np.signbit(b))))
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf; equal infinities are equal by themselves
            near = np.abs(wide_a - wide_b) <= self.tolerance * _scale(wide_a, wide_b)
        return np.asarray(nan | (wide_a == wide_b) | near)


def _scale(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The larger magnitude, at least 1; 0 beside an infinity, which is near to nothing."""
    size = np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))
    return np.where(np.isfinite(size), size, 0.0)


def _plain(item: Any) -> Any:
    return as_numpy(item) if hasattr(item, "detach") else item


def _shown(item: Any) -> object:
    if isinstance(item, np.ndarray):
        return f"{item.dtype}[{', '.join(map(str, item.shape))}]"
    if isinstance(item, Value):
        return item.kind
    if isinstance(item, tuple):
        return f"{len(item)} items"
    return "absent" if item is None else repr(item)
