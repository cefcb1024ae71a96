"""The base of every IR value: a frozen dataclass over read-only numpy arrays with declared dtypes and dimensions.

A field is declared as `tokens: Annotated[Int32, Dims("C")]`. A dimension is a letter, a letter with an offset
(`N+1`), or a number; the same letter has the same size in all fields of one value. dtype, rank and sizes are
checked when the value is made, which costs nothing; what costs time is checked by `verify()`.
"""

from __future__ import annotations

import hashlib
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harts.errors import VerifyError

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

TensorLike = Any
"""A torch tensor, or the numpy array that a dump of one was read as. The IR itself never imports torch."""


class Dims:
    """Declared dimensions of an array field: `Dims("Q", "W-1")`."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def solve(self, shape: tuple[int, ...], sizes: dict[str, int]) -> str | None:
        """Bind the letters that `sizes` does not hold yet; return what is wrong, or None."""
        if len(shape) != len(self.names):
            return f"has {len(shape)} dimensions, declared are {len(self.names)} ({', '.join(self.names)})"
        for name, size in zip(self.names, shape, strict=True):
            letter, shift = _parse(name)
            known = sizes.setdefault(letter, size - shift)
            if known + shift != size:
                return f"has size {size} where {name} is {known + shift}"
        return None


def _parse(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z]\w*)?([+-]?\d+)?", name)
    if match is None or not name:
        raise TypeError(f"{name!r} is not a dimension")
    return match[1] or "", int(match[2] or 0)


class ArrayField(NamedTuple):
    """What the annotation of one array field declares."""

    name: str
    dtype: np.dtype[Any]
    dims: Dims
    optional: bool


class Invariant(NamedTuple):
    """One invariant of a value: `broken` is a bool, or a bool array that is True where the sentence does not hold."""

    field: str
    broken: Any
    sentence: str


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """One value between two stages. Subclasses set `kind`; a change of their fields raises `version`."""

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    kinds: ClassVar[dict[str, type[Value]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.kind:
            if cls.kind in Value.kinds:
                raise TypeError(f"the kind {cls.kind!r} is taken by {Value.kinds[cls.kind].__module__}")
            Value.kinds[cls.kind] = cls

    def __repr__(self) -> str:
        cls: Any = type(self)
        shapes = {spec.name: getattr(self, spec.name) for spec in array_fields(cls)}
        sizes = [f"{name}{list(array.shape)}" for name, array in shapes.items() if array is not None]
        return f"<{self.kind} v{self.version} {' '.join(sizes)}>"

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {"": 0}
        cls: Any = type(self)
        for spec in array_fields(cls):
            array = getattr(self, spec.name)
            if array is None and spec.optional:
                continue
            object.__setattr__(self, spec.name, self._checked(spec, array, sizes))

    def _checked(self, spec: ArrayField, array: Any, sizes: dict[str, int]) -> Any:
        if not isinstance(array, np.ndarray) or array.dtype != spec.dtype:
            got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise VerifyError(f"{self.kind}.{spec.name}: is {got}, declared is {spec.dtype}")
        fault = spec.dims.solve(array.shape, sizes)
        if fault is not None:
            raise VerifyError(f"{self.kind}.{spec.name}: {fault}")
        view = array.view()
        view.flags.writeable = False
        return view

    def invariants(self) -> Iterator[Invariant]:
        """Yield every invariant that dtypes and sizes do not say."""
        return iter(())

    def verify(self) -> None:
        """Check this value (not those it was made from).

        Raises:
            VerifyError: one sentence for the first broken invariant, with kind, field and first bad index.
        """
        for field, broken, sentence in self.invariants():
            bad = np.flatnonzero(np.atleast_1d(broken))
            if bad.size:
                where = f"[{bad[0]}]" if np.ndim(broken) else ""
                raise VerifyError(f"{self.kind}.{field}{where}: {sentence}")

    def parents(self) -> Iterator[Value]:
        """The values this one holds: what it was made from."""
        for field in fields(self):
            held = getattr(self, field.name)
            for item in held if isinstance(held, tuple) else (held,):
                if isinstance(item, Value):
                    yield item

    def digest(self) -> str:
        """Hash of the content: equal for equal values on every machine. 32 hexadecimal digits."""
        state = hashlib.blake2b(digest_size=16)
        state.update(f"{self.kind} v{self.version}".encode())
        for field in fields(self):
            state.update(f"\0{field.name}\0".encode())
            _absorb(state, getattr(self, field.name))
        return state.hexdigest()


def _absorb(state: Any, item: Any) -> None:
    if isinstance(item, Value):
        state.update(item.digest().encode())
    elif isinstance(item, tuple):
        state.update(f"({len(item)}".encode())
        for each in item:
            _absorb(state, each)
    elif isinstance(item, np.ndarray) or hasattr(item, "detach"):
        array = as_numpy(item)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data)
    else:
        state.update(repr(item).encode())


def as_numpy(item: TensorLike) -> NDArray[Any]:
    """A numpy array of the same bits; a torch tensor is detached and copied to the host (bfloat16 as float32)."""
    if isinstance(item, np.ndarray):
        return item
    host = item.detach().cpu()
    if str(host.dtype) == "torch.bfloat16":
        host = host.float()
    return np.asarray(host.numpy())


@cache
def array_fields(cls: type[Any]) -> tuple[ArrayField, ...]:
    """The declared array fields of a value class, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in fields(cls):
        spec = _array_field(field.name, hints[field.name])
        if spec is not None:
            found.append(spec)
    return tuple(found)


def _array_field(name: str, hint: Any) -> ArrayField | None:
    if typing.get_origin(hint) is not typing.Annotated:
        return None
    kind, *marks = typing.get_args(hint)
    dims = next((mark for mark in marks if isinstance(mark, Dims)), None)
    if dims is None:
        return None
    optional = False
    if typing.get_origin(kind) in (typing.Union, UnionType):
        (kind,) = (arm for arm in typing.get_args(kind) if arm is not NoneType)
        optional = True
    scalar = typing.get_args(kind)[-1]  # the dtype up to numpy 2.4, the scalar itself from 2.5 on
    return ArrayField(name, np.dtype((typing.get_args(scalar) or (scalar,))[0]), dims, optional)
