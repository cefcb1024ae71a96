"""The launch: FlashAttention 4 over the compact rows with lists of tiles. Importing this needs `flash-attn-4`."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func
from torch import Tensor

from harts.backends.full.tree.plan import DeviceLists, TreePlan


@cute.jit  # type: ignore[untyped-decorator]
def sees(batch: Any, head: Any, query: Any, key: Any, seqlen: Any, aux: Any) -> Any:  # noqa: PLR0917  (as it is called)
    """Whether a query row sees a key row: enter[key] <= enter[query] < leave[key]."""
    place, _ = _interval(aux[0], query[0])
    first, end = _interval(aux[0], key[0])
    return (first <= place) & (place < end)


def _interval(intervals: Any, row: Any) -> tuple[Any, Any]:
    """Read both ends of a row's interval.

    As an instruction without side effects: one load a row of a tile, all of them in flight at once. An indexed tensor
    is read anew for each pair of rows, one after the other, which takes as long as several tiles.
    """
    address = (intervals.iterator + 2 * row).toint().ir_value()
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32(), T.i32()]),
        [address],
        "ld.global.nc.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    first, end = (utils.scalar_to_ssa(Int32(llvm.extractvalue(T.i32(), pair, [i])), Int32) for i in (0, 1))
    return first, end


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
        aux_tensors=[plan.intervals],
        block_sparse_tensors=_block_sparse(plan.keys_of_queries),
        block_sparse_tensors_bwd=_block_sparse(plan.queries_of_keys),
    )[0]
    return output[0]


def _block_sparse(lists: DeviceLists) -> Any:
    return BlockSparseTensorsTorch(
        lists.partial_count, lists.partial_index, lists.full_count, lists.full_index, block_size=lists.tile
    )
