"""What heads and head dims every backend of full attention needs."""

from __future__ import annotations

from harts.backends.base import Need


def head_faults(need: Need) -> list[str]:
    """Reasons in the numbers of heads and in the head dims."""
    heads, groups = need.full_heads
    found = []
    if min(heads, groups) < 1 or heads % groups:
        found.append(f"{heads} query heads are not a positive multiple of {groups} key/value heads")
    if min(need.full_head_dims) < 1:
        found.append(f"head dims {need.full_head_dims} (query/key, value) must be at least 1")
    return found
