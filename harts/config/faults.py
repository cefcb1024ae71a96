"""Faults of a pipeline file: gathered, located, and raised together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harts.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the file."""


@dataclass(frozen=True)
class Spot:
    """Where something was written: a place in the file, or a `--set`."""

    source: str
    """The file as it was named, or `--set a.b=c`."""
    line: int | None = None
    """From 1; None for a `--set` and for the file as a whole."""
    column: int | None = None
    """From 1."""
    raw: str | None = None
    """The scalar as it was written, quotes included."""

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorts the file's spots by place, before those of `--set`."""
        return self.line is None, self.line or 0, self.column or 0

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    spot: Spot
    key: str
    """Full key path; empty if the fault is not about a key."""
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.spot), self.key, self.text) if part)


class Faults:
    """What is wrong so far."""

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def add(self, spot: Spot, key: str, text: str) -> None:
        """Note one fault; of several about one key at one place the first counts, the others follow from it."""
        if not any(fault.spot == spot and fault.key == key for fault in self.found):
            self.found.append(Fault(spot, key, text))

    def raise_any(self) -> None:
        """Stop if there is a fault.

        Raises:
            ConfigError: with all of them, a line each, in the order of the file and then of the `--set`s.
        """
        if self.found:
            ordered = sorted(self.found, key=lambda fault: fault.spot.order)
            raise ConfigError("\n".join(map(str, ordered)))


def dotted(path: Path) -> str:
    """`train.objective.type`, `pipeline[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean x? known: x, y`; the question only if something is close."""
    names = list(known)
    close = closest(word, names, 0.6)
    hint = f"did you mean {close}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def closest(word: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The known name that a misspelt one most likely is; hyphens and capitals do not count.

    Args:
        word: as it was written.
        known: what it could mean.
        cutoff: likeness that is enough, of 1.
    """
    names = list(known)
    close = difflib.get_close_matches(word.replace("-", "_").lower(), names, n=1, cutoff=cutoff)
    return close[0] if close else None


def shown(value: Any, raw: str | None = None) -> str:
    """A value as it was written, with the kind that it was read as."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return f"{str(value).lower()}, a boolean"
    if isinstance(value, str):
        return f'the text "{value}"'
    written = repr(value) if raw is None or "${" in raw else raw
    return f"{written}, {'an integer' if isinstance(value, int) else 'a number with a fraction or exponent'}"
