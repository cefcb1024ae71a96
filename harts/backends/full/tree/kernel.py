"""The launches: FlashAttention 4 over packed sequences, and over lists of tiles. Importing this needs `flash-attn-4`.

These call the functions under the library's public ones, which write to memory that they are given: its last stride has
to be 1, the others and its address multiples of 16 bytes. What they read and lies otherwise is copied by them.

Shape suffixes: n queries, m keys, H query heads, G key/value heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from harts.backends.full.packed import PackedViews
from harts.backends.full.tree.plan import DeviceLists, Listed


class Operands(NamedTuple):
    """Of one launch; the forward pass writes out and lse."""

    q: Tensor
    """[n, H, Dk]."""
    k: Tensor
    """[m, G, Dk]."""
    v: Tensor
    """[m, G, Dv]."""
    out: Tensor
    """[n, H, Dv]."""
    lse: Tensor
    """Log-sum-exps of the scores, float32, [H, n]."""


class Gradients(NamedTuple):
    """Of q, k and v of one launch, in their shapes; the backward pass writes them."""

    q: Tensor
    k: Tensor
    v: Tensor


@cute.jit  # type: ignore[untyped-decorator]
def sees(batch: Any, head: Any, query: Any, key: Any, seqlen: Any, aux: Any) -> Any:  # noqa: PLR0917  (as it is called)
    """Whether a query row sees a key row: enter[key] <= enter[query] < leave[key]."""
    place, _ = _interval(aux[0], query[0])
    first, end = _interval(aux[1], key[0])
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


def packed_forward(x: Operands, packed: PackedViews, scale: float) -> None:
    """Attend in packed sequences, each row to those before it and to itself."""
    _flash_attn_fwd(x.q, x.k, x.v, out=x.out, lse=x.lse, **_of_sequences(packed, scale))


def packed_backward(x: Operands, grad: Tensor, written: Gradients, packed: PackedViews, scale: float) -> None:
    """The same, from the gradient of out."""
    dq, dk, dv = written
    _flash_attn_bwd(x.q, x.k, x.v, x.out, grad, x.lse, dq=dq, dk=dk, dv=dv, **_of_sequences(packed, scale))


def listed_forward(x: Operands, listed: Listed, scale: float) -> None:
    """Attend from listed rows to all rows."""
    q, k, v, out, lse = (each[None] for each in x)
    _flash_attn_fwd(q, k, v, out=out, lse=lse, **_of_tiles(listed, listed.keys_of_queries, scale))


def listed_backward(x: Operands, grad: Tensor, written: Gradients, listed: Listed, scale: float) -> None:
    """The same, from the gradient of out."""
    q, k, v, out, lse, grad, dq, dk, dv = (each[None] for each in (*x, grad, *written))
    tiles = _of_tiles(listed, listed.queries_of_keys, scale)
    _flash_attn_bwd(q, k, v, out, grad, lse, dq=dq, dk=dk, dv=dv, **tiles)


def _of_sequences(packed: PackedViews, scale: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q": packed.cu_q,
        "cu_seqlens_k": packed.cu_k,
        "max_seqlen_q": packed.max_q,
        "max_seqlen_k": packed.max_k,
        "softmax_scale": scale,
        "causal": True,
    }


def _of_tiles(listed: Listed, lists: DeviceLists, scale: float) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "mask_mod": sees,
        "aux_tensors": [listed.places, listed.intervals],
        "block_sparse_tensors": _block_sparse(lists),
    }


def _block_sparse(lists: DeviceLists) -> Any:
    return BlockSparseTensorsTorch(
        lists.partial_count, lists.partial_index, lists.full_count, lists.full_index, block_size=lists.tile
    )
