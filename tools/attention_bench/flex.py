"""A plain FlexAttention mask over the compact rows: what a user of torch writes for a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from harts.backends.base import AttentionCost, FullAttention, Need
from harts.backends.full.costs import pass_flops
from harts.backends.full.tree.preorder import preorder
from harts.backends.full.tree.tiles import Tiles, visible_tiles
from harts.backends.plan_tensors import AttentionViews

BLOCK = 128


class Flex(FullAttention):
    """FlexAttention of compact queries and compact keys; its blocks are listed from runs."""

    expands = False

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
        return AttentionCost(0, pass_flops(len(_tiles(views).query) * BLOCK * BLOCK, need))

    def call(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: see `FullAttention.attend`; without compilation on a CPU, where there is no backward pass."""
        kernel = self.compiled if q.is_cuda else flex_attention
        mask = views.once("flex_mask", lambda: block_mask(views))
        rows = int(views.cu_q[-1])
        inputs = (each[:rows].transpose(0, 1)[None] for each in (q, k, v))
        out: Tensor = kernel(*inputs, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return functional.pad(out[0].transpose(0, 1), (0, 0, 0, 0, 0, views.rows - rows))


def block_mask(views: AttentionViews) -> BlockMask:
    """Blocks that are seen as a whole, and blocks that the preorder of rows masks; those at the end are masked."""
    rows, tiles = int(views.cu_q[-1]), _tiles(views)
    number = -(-rows // BLOCK)
    seen, full = np.zeros((2, number, number), dtype=np.bool_)
    seen[tiles.query, tiles.key] = True
    full[tiles.query, tiles.key] = tiles.full
    full[-1] = full[:, -1] = False
    enter, leave = (torch.from_numpy(each).to(views.device, torch.int32) for each in preorder(views))
    return BlockMask.from_kv_blocks(
        *_lists(seen & ~full, views.device),
        *_lists(full, views.device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(enter, leave),
        seq_lengths=(rows, rows),
    )


def _tiles(views: AttentionViews) -> Tiles:
    return views.once("flex_tiles", lambda: visible_tiles(views, BLOCK, BLOCK))


def _mask_mod(enter: Tensor, leave: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (enter[key] <= enter[query]) & (enter[query] < leave[key])

    return seen


def _lists(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, [1, 1, N]; which, ascending, then the others, [1, 1, N, N]."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    count, index = (torch.from_numpy(each).to(device, torch.int32) for each in (blocks.sum(1), order))
    return count[None, None], index[None, None]
