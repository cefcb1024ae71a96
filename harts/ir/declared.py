"""What the annotations of a value's fields allow, checked where values are written and read."""

from __future__ import annotations

import typing
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, TypeVar

import numpy as np

from harts.errors import CodecError
from harts.ir.base import Value


def check_fields(cls: type[Value], items: dict[str, Any]) -> None:
    """Check that exactly the fields of a kind are there, each of the type that it is declared with.

    The dtype and dimensions of arrays are checked where the value is made.

    Raises:
        CodecError: a field is missing, unknown or of another type.
    """
    kind: Any = cls
    hints = _hints(kind)
    missing = [name for name in hints if name not in items]
    unknown = [name for name in items if name not in hints]
    if missing or unknown:
        faults = [f"has no {name}" for name in missing] + [f"has an unknown field {name}" for name in unknown]
        raise CodecError(f"{cls.kind} v{cls.version}: {', '.join(faults)}")
    written = {field.name: field.type for field in fields(cls)}
    for name, hint in hints.items():
        if not _fits(hint, items[name]):
            raise CodecError(f"{cls.kind}.{name}: is {_named(items[name])}, declared is {written[name]}")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _fits(hint: Any, item: Any) -> bool:
    """Exact types: neither True nor a numpy scalar is an int, since they would come back as something else."""
    if isinstance(hint, TypeVar):
        return _fits(hint.__bound__, item)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:  # TensorLike
        return isinstance(item, np.ndarray)
    if origin is typing.Annotated:
        return item is None or isinstance(item, np.ndarray)
    if origin in (typing.Union, UnionType):
        return any(_fits(arm, item) for arm in arguments)
    if origin is tuple:
        return isinstance(item, tuple) and all(_fits(arguments[0], each) for each in item)
    cls = origin or hint
    return isinstance(item, cls) if issubclass(cls, Value) else type(item) is cls


def _named(item: Any) -> str:
    if isinstance(item, tuple):
        return f"a tuple of {', '.join(sorted({type(each).__name__ for each in item})) or 'nothing'}"
    return type(item).__name__
