"""The launch: FlashAttention 4 over the compact rows with lists of tiles. Importing this needs `flash-attn-4`."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func
from torch import Tensor

from harts.backends.full.tree import hopper
from harts.backends.full.tree.hopper import longest_first, run_as_here
from harts.backends.full.tree.plan import DeviceLists, Tile, TreePlan

INTERVAL_BYTES = 8
"""Two numbers of 32 bits."""


@cute.jit  # type: ignore[untyped-decorator]
def sees(  # noqa: PLR0917  (as it is called)
    batch: Any, head: Any, query: Any, key: Any, seqlen: Any, tensors: Any, scalars: Any
) -> Any:
    """Whether a query row sees a key row: 0 <= enter[query] - enter[key] < size[key], as one unsigned comparison."""
    place, _ = _interval(scalars[0], query[0])
    first, size = _interval(scalars[0], key[0])
    return utils.scalar_to_ssa(Uint32(place - first) < Uint32(size), Boolean)


run_as_here(sees)
sees.__cute_hash__ = sha256(b"".join(Path(each).read_bytes() for each in (__file__, hopper.__file__))).hexdigest()
"""What the library keeps compiled kernels by: all that they are made of here, not the text of the mask alone."""


def _interval(address: Any, row: Any) -> tuple[Any, Any]:
    """Read both numbers of a row's interval.

    As an instruction without side effects: one load a row of a tile, all of them in flight at once. An indexed tensor
    is read anew for each pair of rows, one after the other, which takes as long as several tiles. By address, since
    rows are divided by the number of rows before a tensor is read.
    """
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32(), T.i32()]),
        [(address + Int64(INTERVAL_BYTES) * Int64(row)).ir_value()],
        "ld.global.nc.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    first, size = (Int32(llvm.extractvalue(T.i32(), pair, [i])) for i in (0, 1))
    return first, size


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
    with longest_first():
        output: Tensor = flash_attn_func(
            q[None],
            k[None],
            v[None],
            softmax_scale=scale,
            mask_mod=sees,
            aux_scalars=(Int64(plan.intervals.data_ptr()),),
            block_sparse_tensors=_block_sparse(plan.keys_of_queries, plan.sizes.forward),
            block_sparse_tensors_bwd=_block_sparse(plan.queries_of_keys, plan.sizes.backward),
        )[0]
    return output[0]


def _block_sparse(lists: DeviceLists, tile: Tile) -> Any:
    return BlockSparseTensorsTorch(
        lists.partial_count, lists.partial_index, lists.full_count, lists.full_index, block_size=tile
    )
