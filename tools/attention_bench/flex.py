"""A plain FlexAttention mask over the compact rows: what a user of torch writes for a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attention_bench.preorder import block_pairs, preorder
from harts.backends.base import AttentionCost, FullAttention, Need
from harts.backends.full.costs import pass_flops
from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Int64

BLOCK = 128


class Flex(FullAttention):
    """FlexAttention of compact queries and compact keys; its blocks are listed from runs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # sizes as symbols: one compilation serves all microbatches
        self.compiled = torch.compile(flex_attention, dynamic=True)

    def why_not(self, need: Need) -> list[str]:
        """Every reason why FlexAttention cannot serve."""
        if torch.device(need.device).type == "cpu":
            return ["FlexAttention has no backward pass on a CPU"]
        return []

    def deterministic(self, need: Need) -> bool:
        """Nothing is promised."""
        return False

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        """All pairs of the blocks that are visited."""
        visited = int((_block_pairs(views) > 0).sum())
        return AttentionCost(0, pass_flops(visited * BLOCK * BLOCK, need))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: see `FullAttention.attend`; without compilation on a CPU, where there is no backward pass."""
        kernel = self.compiled if q.is_cuda else flex_attention
        mask = views.once("flex_mask", lambda: block_mask(views))
        inputs = (each.transpose(0, 1)[None] for each in (q, k, v))
        out: Tensor = kernel(*inputs, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)


def block_mask(views: AttentionViews) -> BlockMask:
    """Blocks that are seen as a whole, and blocks that the preorder of their rows masks."""
    pairs = _block_pairs(views)
    full = pairs == BLOCK * BLOCK
    enter, leave = (torch.from_numpy(each).to(views.device, torch.int32) for each in preorder(views))
    return BlockMask.from_kv_blocks(
        *_lists((pairs > 0) & ~full, views.device),
        *_lists(full, views.device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(enter, leave),
        seq_lengths=(views.rows, views.rows),
    )


def _block_pairs(views: AttentionViews) -> Int64:
    return views.once("flex_block_pairs", lambda: block_pairs(views, BLOCK))


def _mask_mod(enter: Tensor, leave: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (enter[key] <= enter[query]) & (enter[query] < leave[key])

    return seen


def _lists(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, [1, 1, N]; which, ascending, then the others, [1, 1, N, N]."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    count, index = (torch.from_numpy(each).to(device, torch.int32) for each in (blocks.sum(1), order))
    return count[None, None], index[None, None]
