"""Bytes of a HARTS file: a msgpack stream that begins with the string "HARTS" and goes on with binary objects only.

Writing yields views of the arrays, so that nothing is held twice; reading fills arrays straight from the stream and
checks every length before it takes memory for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from harts.errors import CodecError

MAGIC = msgpack.packb("HARTS")
BIN32 = 0xC6
BIN_LIMIT = 1 << 32
"""A msgpack binary object must be shorter than this, in bytes."""
FRAME_BYTES = 1 << 30
"""An array is cut into binary objects of at most this many bytes."""
DTYPES = frozenset(np.dtype(name).newbyteorder("<").str for name in "?bBhHiIqQefd")
MAX_DIMS = 32

Piece = bytes | memoryview


def packed(content: Any, what: str) -> Iterator[Piece]:
    """Content of plain types as one binary object.

    Raises:
        CodecError: it is too large for one, or an integer has more than 64 bits.
    """
    try:
        data = msgpack.packb(content, use_bin_type=True)
    except (OverflowError, ValueError) as error:
        raise CodecError(f"{what}: cannot be written: {error}") from error
    if len(data) >= BIN_LIMIT:
        raise CodecError(f"{what}: {len(data)} bytes without its arrays; fewer than {BIN_LIMIT} can be written")
    yield struct.pack(">BI", BIN32, len(data))
    yield data


def array_frames(array: NDArray[Any], what: str) -> Iterator[Piece]:
    """Little-endian bytes of an array in C order, as binary objects of at most FRAME_BYTES; none if it is empty.

    Raises:
        CodecError: its dtype is not one of DTYPES.
    """
    if dtype_name(array) not in DTYPES:
        raise CodecError(f"{what}: {array.dtype} cannot be written")
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    view = _bytes_of(flat)
    for first in range(0, len(view), FRAME_BYTES):
        frame = view[first : first + FRAME_BYTES]
        yield struct.pack(">BI", BIN32, len(frame))
        yield frame


def dtype_name(array: NDArray[Any]) -> str:
    """numpy's name of an array's dtype as it is written, with byte order."""
    return array.dtype.newbyteorder("<").str


def _bytes_of(flat: NDArray[Any]) -> memoryview:
    data: Any = flat.view(np.uint8)
    return memoryview(data)


class Reader:
    """Reads what `packed` and `array_frames` wrote, from a stream of known size."""

    def __init__(self, stream: BinaryIO, size: int, name: str) -> None:
        self.stream = stream
        self.left = size
        self.name = name

    def fault(self, text: str) -> CodecError:
        """The error for a fault in this stream."""
        return CodecError(f"{self.name}: {text}")

    def magic(self) -> None:
        """Read the first bytes; they tell this format from all others before anything is interpreted."""
        first = self.stream.read(min(len(MAGIC), self.left))
        self.left -= len(first)
        if first != MAGIC:
            raise self.fault(
                f"is not a HARTS value ({_guess(first)}); accepted are only files that HARTS wrote "
                f"(msgpack, first bytes {MAGIC!r}); pickle, .pt, .npy and .npz are never read"
            )

    def unpacked(self, what: str) -> Any:
        """Plain content of the next binary object."""
        data = bytearray(self._object(what))
        self._fill(memoryview(data))
        try:
            return msgpack.unpackb(data, raw=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise self.fault(f"{what}: is not msgpack: {error}") from error

    def array(self, dtype: Any, shape: Any, what: str) -> NDArray[Any]:
        """The next array."""
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.fault(f"{what}: {dtype!r} is not a dtype that an array may have")
        kind = np.dtype(dtype)
        size = self._size(shape, kind.itemsize, what)
        if size > self.left:
            raise self.fault(f"{what}: is truncated: {kind}{shape} has {size} bytes, {self.left} are left")
        out = np.empty(shape, dtype=kind)
        view = _bytes_of(out.reshape(-1))
        done = 0
        while done < size:
            frame = self._object(what)
            if not 0 < frame <= size - done:
                raise self.fault(f"{what}: a frame has {frame} bytes where {size - done} of {size} are missing")
            self._fill(view[done : done + frame])
            done += frame
        return out.astype(kind.newbyteorder("="), copy=False)

    def _size(self, shape: Any, itemsize: int, what: str) -> int:
        sound = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in shape)
        if not sound or math.prod(max(n, 1) for n in shape) * itemsize >= 1 << 63:
            raise self.fault(f"{what}: {shape!r} is not a shape")
        size: int = math.prod(shape) * itemsize
        return size

    def end(self) -> None:
        """Check that nothing follows."""
        if self.left:
            raise self.fault(f"{self.left} bytes follow after the last value")

    def _object(self, what: str) -> int:
        """Read the head of the next binary object; its length."""
        head = bytearray(5)
        if self.left < len(head):
            raise self.fault(f"{what}: is truncated: {self.left} bytes are left")
        self._fill(memoryview(head))
        code, length = struct.unpack(">BI", head)
        if code != BIN32:
            raise self.fault(f"{what}: byte {code:#04x} where a binary object ({BIN32:#04x}) must begin")
        if length > self.left:
            raise self.fault(f"{what}: is truncated: {length} bytes announced, {self.left} are left")
        return int(length)

    def _fill(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            read = self.stream.readinto(view[got:])  # type: ignore[attr-defined]
            if not read:
                raise self.fault(f"is truncated: it became shorter by {len(view) - got} bytes while it was read")
            got += read
        self.left -= got


def _guess(first: bytes) -> str:
    if first.startswith(b"PK"):
        return "a zip archive, such as a .pt or .npz file"
    if first.startswith(b"\x93NUMPY"):
        return "a .npy file"
    if first.startswith(b"\x80"):
        return "probably a pickle"
    return f"first bytes {first!r}" if first else "it is empty"
