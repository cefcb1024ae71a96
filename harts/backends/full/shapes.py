"""Heads and head dims of full attention: what every backend needs of them, and padding.

Shape suffixes: R rows, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

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


def padded(x: Tensor, width: int) -> Tensor:
    """[R, H, D] with channels of zeros up to a head dim; the tensor itself if it has it."""
    return x if x.shape[2] == width else functional.pad(x, (0, width - x.shape[2]))
