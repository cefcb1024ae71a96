"""Softmax attention through torch's own fused kernel: the oracle of full attention, exact in float64.

Shape suffixes: R compact rows, l queries of a branch, n = h + l keys of a branch, H query heads, G key/value heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harts.backends.base import AttentionCost, FullAttention, Need
from harts.backends.full.costs import pass_flops
from harts.backends.full.shapes import head_faults, padded
from harts.backends.plan_tensors import AttentionViews


class Sdpa(FullAttention):
    """`torch.nn.functional.scaled_dot_product_attention`, branch by branch; MHA, GQA and MLA, any float dtype.

    Keys and values of all branches are gathered at once: sum of h + l rows over branches, at most S where every branch
    ends at a leaf of its own, as with the call plans `min_call` and `flat`. Neither scores nor masks are held as a
    whole: torch's fused kernels keep no scores, and the mask of a branch that has ancestors is a view of one line.
    """

    def why_not(self, need: Need) -> list[str]:
        """Every reason why torch's attention cannot serve."""
        if need.dtype.is_floating_point:
            return head_faults(need)
        return [f"dtype is {need.dtype}; softmax attention needs a floating-point one", *head_faults(need)]

    def deterministic(self, need: Need) -> bool:
        """On a CPU; gradients of gathered rows are summed in any order elsewhere."""
        return torch.device(need.device).type == "cpu"

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        """Branches that have ancestors compute all pairs of a query and a key, and mask; in the wider head dim."""
        queries, keys = np.diff(views.cu_q), np.diff(views.cu_k)
        pairs = np.where(queries == keys, queries * (queries + 1) // 2, queries * keys)
        width = max(need.full_head_dims)
        held = int(views.cu_k[-1]) * need.full_heads[1] * 2 * width * need.dtype.itemsize
        return AttentionCost(held, pass_flops(int(pairs.sum()), replace(need, full_head_dims=(width, width))))

    def call(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: see `FullAttention.attend`; query i of a branch of l sees its keys j <= h + i (equation 22)."""
        own, seen = np.diff(views.cu_q).tolist(), np.diff(views.cu_k).tolist()
        width = max(q.shape[2], v.shape[2])  # the fused CPU kernel wants one head dim; zeros change no score, no output
        queries = torch.split(padded(q, width)[: sum(own)], own)
        keys, values = (torch.split(padded(each, width).index_select(0, views.key_row), seen) for each in (k, v))
        parts = [branch(*each, scale) for each in zip(queries, keys, values, strict=True)]
        padding = q.new_zeros(views.rows - sum(own), q.shape[1], width)
        return torch.cat([*parts, padding])[..., : v.shape[2]]


def branch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend in one branch, bottom-right causal.

    Args:
        q: [l, H, D].
        k: [n, G, D], n >= l: the ancestors, then the branch itself.
        v: [n, G, D].
        scale: factor on the scores.

    Returns:
        [l, H, D].
    """
    q_l, k_n, v_n = (each.transpose(0, 1)[None] for each in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[0] == k.shape[0]:
        out = functional.scaled_dot_product_attention(q_l, k_n, v_n, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        mask = reversed_mask(q.shape[0], k.shape[0], q)
        last_first = q_l.flip(2), k_n, v_n
        out = functional.scaled_dot_product_attention(*last_first, attn_mask=mask, scale=scale, enable_gqa=grouped)
        out = out.flip(2)
    return out.squeeze(0).transpose(0, 1)


def reversed_mask(queries: int, keys: int, like: Tensor) -> Tensor:
    """Additive bottom-right causal mask for queries in reversed order, [l, n], in l + n numbers of memory.

    Query l - 1 - i sees keys j <= n - 1 - i, so the mask depends on i + j alone and both strides can be 1. A mask as a
    whole would be kept for the backward pass, in every branch of every layer.
    """
    line = like.new_zeros(keys + queries - 1)
    line[keys:] = -torch.inf
    return line.as_strided((queries, keys), (1, 1))
