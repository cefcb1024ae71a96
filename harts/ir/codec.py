"""Values as bytes: msgpack with magic, producer, kinds and versions. Data only; nothing that is read can run.

A file is a head and a table of values, parents first; each record is followed by the bytes of its arrays. A value that
several others hold is written once and shared again when read. The same value gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from harts.errors import CodecError, VerifyError
from harts.ir.base import Value, as_numpy
from harts.ir.declared import check_fields
from harts.ir.upgrade import upgraded
from harts.ir.wire import MAGIC, Piece, Reader, array_frames, dtype_name, packed

FORMAT = 1
"""Version of the file's own structure; that of each kind's fields is `Value.version`."""
SCALARS = (NoneType, bool, int, float, str)


def encode(value: Value) -> bytes:
    """The bytes of a value and of all that it holds.

    Raises:
        CodecError: a field holds what its annotation does not say, or is too large; kind and field are named.
    """
    return b"".join(_pieces(value))


def save(value: Value, path: str | Path) -> None:
    """Write a value to a file, array by array; a file that exists is replaced only once all is written.

    Raises:
        CodecError: as `encode`, or the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for piece in _pieces(value):
                file.write(piece)
        partial.replace(path)
    except OSError as error:
        raise CodecError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def decode(data: bytes) -> Value:
    """The value of its bytes. Structure, dtypes and sizes are checked; `verify()` is the caller's choice.

    Raises:
        CodecError: the bytes are no HARTS value, truncated, followed by others, of an unknown kind or newer version,
            or a field is missing, unknown or of the wrong type; kind, field and numbers are named.
    """
    return _read(Reader(io.BytesIO(data), len(data), "bytes"))


def load(path: str | Path) -> Value:
    """Read a value from a file; memory for its arrays is all that is taken.

    Raises:
        CodecError: as `decode`, with the path, or the file cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(Reader(file, path.stat().st_size, str(path)))
    except OSError as error:
        raise CodecError(f"{path}: cannot be read: {error.strerror}") from error


def _pieces(value: Value) -> Iterator[Piece]:
    found: dict[int, Value] = {}
    _collect(value, found)
    number = {key: i for i, key in enumerate(found)}
    yield MAGIC
    head = {"format": FORMAT, "producer": producer(), "values": len(found), "kind": value.kind}
    yield from packed(head, "head")
    for held in found.values():
        yield from _record(held, number)


def _collect(value: Value, found: dict[int, Value]) -> None:
    """Each distinct object once, those held before their holder. Values nest no deeper than a pipeline has stages."""
    if id(value) not in found:
        for held in value.parents():
            _collect(held, found)
        found[id(value)] = value


@cache
def producer() -> str:
    """What writes a file: the package and its version."""
    try:
        return f"harts {metadata.version('harts')}"
    except metadata.PackageNotFoundError:
        return "harts, not installed"


def _record(value: Value, number: dict[int, int]) -> Iterator[Piece]:
    items = {field.name: getattr(value, field.name) for field in fields(value)}
    items = {name: as_numpy(item) if hasattr(item, "detach") else item for name, item in items.items()}
    check_fields(type(value), items)
    plain = {name: _plain(item, number) for name, item in items.items()}
    yield from packed({"kind": value.kind, "version": value.version, "fields": plain}, value.kind)
    for name, item in items.items():
        if isinstance(item, np.ndarray):
            yield from array_frames(item, f"{value.kind}.{name}")


def _plain(item: Any, number: dict[int, int]) -> Any:
    if isinstance(item, Value):
        return {"value": number[id(item)]}
    if isinstance(item, np.ndarray):
        return {"array": [dtype_name(item), list(item.shape)]}
    return [_plain(each, number) for each in item] if isinstance(item, tuple) else item


def _read(reader: Reader) -> Value:
    reader.magic()
    head = _keys(reader, reader.unpacked("head"), "head", ("format", "producer", "values", "kind"))
    if head["format"] != FORMAT:
        raise reader.fault(f"file format {head['format']!r} by {head['producer']}; this release reads {FORMAT}")
    table: list[Value] = []
    while not table or len(table) != head["values"]:
        try:
            table.append(_next(reader, table))
        except (CodecError, VerifyError) as error:
            raise _placed(reader, error, head["producer"]) from error
    reader.end()
    if table[-1].kind != head["kind"]:
        raise reader.fault(f"holds {table[-1].kind} where the head says {head['kind']!r}")
    return table[-1]


def _placed(reader: Reader, error: Exception, producer: Any) -> CodecError:
    text = str(error).removeprefix(f"{reader.name}: ")
    return reader.fault(f"{text} (written by {producer})")


def _next(reader: Reader, table: list[Value]) -> Value:
    what = f"value {len(table)}"
    record = _keys(reader, reader.unpacked(what), what, ("kind", "version", "fields"))
    kind, version, content = record["kind"], record["version"], record["fields"]
    cls = Value.kinds.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise reader.fault(f"{what}: unknown kind {kind!r}; known: {', '.join(sorted(Value.kinds))}")
    if type(version) is not int or not isinstance(content, dict):
        raise reader.fault(f"{kind}: is not a record of a version and fields")
    items = {name: _item(reader, table, item, f"{kind}.{name}") for name, item in content.items()}
    items = upgraded(cls, version, items)
    check_fields(cls, items)
    return cls(**items)


def _keys(reader: Reader, got: Any, what: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(got, dict) or tuple(got) != wanted:
        keys = list(got) if isinstance(got, dict) else type(got).__name__
        raise reader.fault(f"{what}: has {keys} where {list(wanted)} is wanted")
    return got


def _item(reader: Reader, table: list[Value], item: Any, what: str) -> Any:
    match item:
        case {"value": int(index), **rest} if not rest and 0 <= index < len(table):
            return table[index]
        case {"array": [dtype, shape], **rest} if not rest:
            return reader.array(dtype, shape, what)
        case list():
            return tuple(_element(reader, table, each, what) for each in item)
    return _scalar(reader, item, what)


def _element(reader: Reader, table: list[Value], item: Any, what: str) -> Any:
    match item:
        case {"value": int(index), **rest} if not rest and 0 <= index < len(table):
            return table[index]
    return _scalar(reader, item, what)


def _scalar(reader: Reader, item: Any, what: str) -> Any:
    if type(item) not in SCALARS:
        raise reader.fault(f"{what}: {item!r} is not a scalar, an array, a tuple or an earlier value")
    return item
