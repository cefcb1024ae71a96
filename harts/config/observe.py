"""The `observe` section: what is checked, shown and kept of every value between two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt, field_validator

from harts.config.faults import suggestion
from harts.ir import Value
from harts.schema import StageConfig


class ObserveConfig(StageConfig):
    """Observers of a pipeline."""

    verify: Literal["off", "on", "roundtrip"] = "on"
    """on: check the invariants of every value. roundtrip: also encode it, decode it and compare the digests."""
    print: tuple[str, ...] = ()
    """Kinds of values to print as text, for instance round_plan."""
    print_limit: PositiveInt = 40
    """Lines of text a value."""
    dump: Path | None = None
    """Folder for one file an edge, `NN_stage.harts`; it is made if absent."""
    time: bool = True
    """Report the seconds of each stage."""
    progress: bool = True
    """Show progress on stderr if it is a terminal."""

    @field_validator("print")
    @classmethod
    def _known_kinds(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [kind for kind in kinds if kind not in Value.kinds]
        if unknown:
            raise ValueError(f"got {unknown[0]!r}; {suggestion(unknown[0], sorted(Value.kinds))}")
        return kinds
