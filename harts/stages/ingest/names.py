"""The fields that a record may hold, and the ones that look like them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from harts.ir.rollout_batch import TOKEN_COLUMNS, TRAJECTORY_COLUMNS

REQUIRED = ("id", "group", "tokens", "loss_mask")

FRONT_ONLY = ("lcp", "suffix", "loss_spans")
"""What a front-coded line holds in place of `tokens` and `loss_mask`."""

READ = (*REQUIRED, *FRONT_ONLY, "reward_known", "parent", "shared_length", *TRAJECTORY_COLUMNS, *TOKEN_COLUMNS)

METADATA = ("turn_boundaries", "roles", "keep", "tb")
"""Known, and not read."""

CLOSE = 0.87
"""Ratio of difflib from which a name counts as a slip: `token_ids` or `group_id` are other words, not slips."""


def misnamed(fields: Iterable[str], names: tuple[str, ...] = READ) -> Iterator[tuple[str, str]]:
    """Unknown fields that are likely meant to be one of `names`, as (field, the known name). Others are metadata."""
    for field in fields:
        if field not in names and field not in METADATA:
            meant = _meant(field, names)
            if meant is not None:
                yield field, meant


def _meant(field: str, names: tuple[str, ...]) -> str | None:
    here = _squash(field)
    for known in names:
        if _squash(known) == here:
            return known
    close = [known for known in names if known[0] == here[:1] and _ratio(_squash(known), here) >= CLOSE]
    return max(close, key=lambda known: _ratio(_squash(known), here), default=None)


def _squash(field: str) -> str:
    return field.lower().replace("_", "").replace("-", "").removesuffix("s")


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
