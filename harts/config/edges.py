"""Edge types of a chain of stages, checked when the file is loaded: exact, with one lifting rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

from harts.ir import PerMicrobatch, RolloutBatch


class Lift(NamedTuple):
    """How one stage takes part in the chain."""

    takes: Any
    """Type of the value that it is given."""
    gives: Any
    """Type of the value after it."""
    mapped: bool
    """Whether it runs once for each microbatch."""


def lifts(stages: Sequence[tuple[str, type[Any]]]) -> Iterator[Lift | str]:
    """For each (name, stage class) its place in the chain, or what is wrong with its edge."""
    before = ""
    given: Any = None
    for i, (name, cls) in enumerate(stages):
        wanted, out = cls.edge
        here = f"{name} ({cls.__name__})"
        if i == 0 and wanted in (NoneType, None, RolloutBatch):
            yield Lift(wanted, out, False)
            given = out
        elif i == 0:
            yield f"{here} takes {type_name(wanted)}, but it is the first stage, which nothing comes before"
            given = out
        elif given == wanted:
            yield Lift(given, out, False)
            given = out
        elif get_origin(given) is PerMicrobatch and get_args(given)[0] == wanted:
            lifted = PerMicrobatch[out]  # type: ignore[valid-type]
            yield Lift(given, lifted, True)
            given = lifted
        else:
            yield f"{here} takes {type_name(wanted)}, but {before} before it gives {type_name(given)}"
            given = PerMicrobatch[out] if get_origin(given) is PerMicrobatch else out  # type: ignore[valid-type]
        before = here


def type_name(edge: Any) -> str:
    """`PerMicrobatch[SegmentTree]`, `nothing`."""
    if edge in (NoneType, None):
        return "nothing"
    inner = ", ".join(type_name(each) for each in get_args(edge))
    name = getattr(get_origin(edge) or edge, "__name__", str(edge))
    return f"{name}[{inner}]" if inner else str(name)
