"""FlashAttention 4 in CuTe DSL (package `flash-attn-4`, extra `fa4`)."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from harts.backends.base import Need
from harts.backends.devices import capability
from harts.backends.full.packed import Expanding, import_faults, machine_faults, order_faults, packed_views
from harts.backends.plan_tensors import AttentionViews
from harts.schema import StageConfig

MODULE = "flash_attn.cute.interface"
HOPPER = 9
"""Major compute capability."""
QUERY_TILE = 128
"""Most query rows of a tile of the backward pass."""


def grouped_head_faults(need: Need) -> list[str]:
    """Whether the backward kernels for compute capability 9.0 take this ratio of heads with these head dims."""
    (heads, groups), (key_dim, value_dim) = need.full_heads, need.full_head_dims
    if heads == groups or key_dim == value_dim:
        return []
    return [
        f"its backward pass of grouped heads ({heads} over {groups}) on compute capability 9.0 needs one head dim, "
        f"they are {need.full_head_dims} (query/key, value)"
    ]


def head_dim_faults(need: Need) -> list[str]:
    """Whether the backward kernels of FlashAttention 4.0.0b36 for compute capability 9.0 are known to have these dims.

    With others some do not compile, such as (128, 32), or ask for more shared memory than there is, such as (64, 128).
    """
    key_dim, value_dim = need.full_head_dims
    if value_dim == key_dim or (value_dim in {64, 128} and value_dim < key_dim):
        return []
    return [
        f"its backward pass on compute capability 9.0 needs equal head dims, or values of 64 or 128 under wider keys, "
        f"they are {need.full_head_dims} (query/key, value)"
    ]


class FlashAttention4Config(StageConfig):
    """Settings of FlashAttention 4."""

    deterministic: bool = False
    """Sum gradients in a fixed order: equal bits in every run, slower. Otherwise those of queries, and of keys and
    values of grouped heads, are summed in any order."""


class FlashAttention4(Expanding):
    """`flash_attn_varlen_func`. Kernels are compiled on first use, in seconds, for head dims and a ratio of heads."""

    Config = FlashAttention4Config
    config: FlashAttention4Config

    def _faults(self, need: Need) -> list[str]:
        found = machine_faults(need, (9, 0)) + import_faults(MODULE, "fa4") + order_faults(self.deterministic(need))
        if any(dim % 8 or not 8 <= dim <= 256 for dim in need.full_head_dims):
            found.append(f"head dims {need.full_head_dims} (query/key, value) are not multiples of 8 from 8 to 256")
        has = capability(need.device)
        if has is not None and has[0] == HOPPER:
            found += grouped_head_faults(need) + head_dim_faults(need)
        return found

    def _query_rows(self, views: AttentionViews) -> int:
        """Gradients of queries are summed in whole tiles of each branch."""
        return int(views.cu_q[-1]) + len(views.cu_q) * QUERY_TILE

    def deterministic(self, need: Need) -> bool:
        """As the config says."""
        return self.config.deterministic

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        packed = packed_views(views)
        out: Tensor = import_module(MODULE).flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=packed.cu_q,
            cu_seqlens_k=packed.cu_k,
            max_seqlen_q=packed.max_q,
            max_seqlen_k=packed.max_k,
            softmax_scale=scale,
            causal=True,  # bottom-right
            deterministic=self.config.deterministic,
        )[0]
        return out
