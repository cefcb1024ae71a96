"""Records and files for the ingest tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HEADER = {"format": "rollout-front-1"}


def record(name: str = "a", tokens: Iterable[int] = (1, 2, 3), **fields: Any) -> dict[str, Any]:
    """A record in the full form, every token but the first trained; keywords replace or add fields."""
    ids = list(tokens)
    made = {"id": name, "group": "g", "tokens": ids, "loss_mask": [0] + [1] * (len(ids) - 1)}
    return made | fields


def front(name: str, lcp: int, suffix: list[int], loss_spans: list[list[int]], **fields: Any) -> dict[str, Any]:
    return {"id": name, "group": "g", "lcp": lcp, "suffix": suffix, "loss_spans": loss_spans} | fields


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in records))
    return path
