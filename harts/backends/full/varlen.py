"""Torch's own packed attention, `torch.nn.attention.varlen.varlen_attn` (FlashAttention 2)."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from harts.backends.base import Need
from harts.backends.full.packed import Expanding, machine_faults, order_is_asked, packed_views
from harts.backends.linear.sizes import ceil_div
from harts.backends.plan_tensors import AttentionViews

MODULE = "torch.nn.attention.varlen"
MULTIPLE = 8
"""Head dims of the kernel are multiples of it."""
MAX_HEAD_DIM = 256


class Varlen(Expanding):
    """Needs no package beside torch. Query/key and value dims are padded to one head dim, a multiple of 8."""

    def _faults(self, need: Need) -> list[str]:
        found = machine_faults(need, (8, 0))
        missing = sorted({"scale", "window_size"} - parameters())
        if missing:
            found.append(f"varlen_attn of torch {torch.__version__} takes no {' and no '.join(missing)}")
        if max(need.full_head_dims) > MAX_HEAD_DIM:
            found.append(f"head dims {need.full_head_dims} (query/key, value) are above {MAX_HEAD_DIM}")
        return found

    def deterministic(self, need: Need) -> bool:
        """Where torch is set to deterministic algorithms: gradients of queries are summed in any order otherwise."""
        return order_is_asked()

    def _head_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        width = padded_dim(key_dim, value_dim)
        return width, width

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        packed = packed_views(views)
        # older versions group heads without being told to
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] and "enable_gqa" in parameters() else {}
        out: Tensor = varlen_attn()(q, k, v, *packed, scale=scale, window_size=(-1, 0), **grouped)
        return out


def padded_dim(key_dim: int, value_dim: int) -> int:
    """The one head dim that the kernel gets."""
    return ceil_div(max(key_dim, value_dim), MULTIPLE) * MULTIPLE


def varlen_attn() -> Any:
    """The function; none in a torch that does not have it."""
    try:
        return import_module(MODULE).varlen_attn
    except (ImportError, AttributeError):
        return None


@cache
def parameters() -> frozenset[str]:
    """Names of what the function takes: they differ between versions of torch."""
    function = varlen_attn()
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)
