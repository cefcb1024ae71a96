"""Softmax attention through torch's own fused kernel: the oracle of full attention, exact in float64.

Shape suffixes: R compact rows, l queries of a branch, n = h + l keys of a branch, H query heads, G key/value heads.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from harts.backends.base import FullAttention, Need
from harts.backends.plan_tensors import AttentionViews

QUERY_BLOCK = 512
"""Queries of one call where a mask is needed: bounds the mask to QUERY_BLOCK x n."""


class Sdpa(FullAttention):
    """`torch.nn.functional.scaled_dot_product_attention`, branch by branch; MHA, GQA and MLA, any float dtype.

    Keys and values of all branches are gathered at once. Every branch ends at a leaf of its own, so these are at most
    S rows. Scores are never held as a whole: torch's fused kernels do not keep them, and the mask of the branches
    that have ancestors is made for QUERY_BLOCK queries at a time.
    """

    def why_not(self, need: Need) -> list[str]:
        """Every reason why torch's attention cannot serve."""
        reasons = []
        heads, groups = need.full_heads
        if not need.dtype.is_floating_point:
            reasons.append(f"dtype is {need.dtype}; softmax attention needs a floating-point one")
        if min(heads, groups) < 1 or heads % groups:
            reasons.append(f"{heads} query heads are not a positive multiple of {groups} key/value heads")
        if min(need.full_head_dims) < 1:
            reasons.append(f"head dims {need.full_head_dims} (query/key, value) must be at least 1")
        return reasons

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: see `FullAttention.attend`; query i of a branch of l sees its keys j <= h + i (equation 22)."""
        queries = torch.split(q[: views.cu_q[-1]], _lengths(views.cu_q))
        keys = torch.split(k.index_select(0, views.key_row), _lengths(views.cu_k))
        values = torch.split(v.index_select(0, views.key_row), _lengths(views.cu_k))
        parts = [branch(*each, scale) for each in zip(queries, keys, values, strict=True)]
        padding = q.new_zeros(views.rows - views.cu_q[-1], q.shape[1], v.shape[2])
        return torch.cat([*parts, padding])


def _lengths(cumulative: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(cumulative)]


def branch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend in one branch, bottom-right causal.

    Args:
        q: [l, H, Dk].
        k: [n, G, Dk], n >= l: the ancestors, then the branch itself.
        v: [n, G, Dv].
        scale: factor on the scores.

    Returns:
        [l, H, Dv].
    """
    width = max(q.shape[2], v.shape[2])  # the fused CPU kernel wants one head dim; zeros change no score and no output
    q_l, k_n, v_n = (functional.pad(each, (0, width - each.shape[2])).transpose(0, 1)[None] for each in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[0] == k.shape[0]:
        out = functional.scaled_dot_product_attention(q_l, k_n, v_n, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        out = torch.cat(_blocks(q_l, k_n, v_n, scale, grouped), dim=2)
    return out[0].transpose(0, 1)[..., : v.shape[2]]


def _blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, grouped: bool) -> list[Tensor]:
    """Outputs of QUERY_BLOCK queries at a time, each against the keys that its last query sees."""
    ancestors, outputs = k.shape[2] - q.shape[2], []
    for first in range(0, q.shape[2], QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, q.shape[2])
        seen = torch.arange(ancestors + last, device=q.device)
        mask = seen[None, :] <= seen[ancestors + first :, None]
        block = q[:, :, first:last], k[:, :, : ancestors + last], v[:, :, : ancestors + last]
        outputs.append(functional.scaled_dot_product_attention(*block, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return outputs
