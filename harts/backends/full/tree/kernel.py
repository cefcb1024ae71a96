"""The launch: FlashAttention 4 over the compact rows with lists of tiles. Importing this needs `flash-attn-4`."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func
from torch import Tensor

from harts.backends.full.tree.plan import DeviceLists, TreePlan


@cute.jit  # type: ignore[untyped-decorator]
def sees(batch: Any, head: Any, query: Any, key: Any, seqlen: Any, places: Any) -> Any:  # noqa: PLR0917  (as it is called)
    """Whether a query row sees a key row: enter[key] <= enter[query] < leave[key]."""
    enter, leave = places[0], places[1]
    place = utils.scalar_to_ssa(enter[query[0]], cutlass.Int32)
    first = utils.scalar_to_ssa(enter[key[0]], cutlass.Int32)
    end = utils.scalar_to_ssa(leave[key[0]], cutlass.Int32)
    return (first <= place) & (place < end)


def run(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> Tensor:
    """Attend over rows; differentiable.

    Args:
        q: [C, H, Dk].
        k: [C, G, Dk].
        v: [C, G, Dv].
        plan: of the rows, for these head dims.
        scale: factor on the scores.

    Returns:
        [C, H, Dv].
    """
    output: Tensor = flash_attn_func(
        q[None],
        k[None],
        v[None],
        softmax_scale=scale,
        mask_mod=sees,
        aux_tensors=[plan.enter, plan.leave],
        block_sparse_tensors=_block_sparse(plan.keys_of_queries),
        block_sparse_tensors_bwd=_block_sparse(plan.queries_of_keys),
    )[0]
    return output[0]


def _block_sparse(lists: DeviceLists) -> Any:
    return BlockSparseTensorsTorch(
        lists.partial_count, lists.partial_index, lists.full_count, lists.full_index, block_size=lists.tile
    )
