"""FlashAttention 4 in plain torch: what its functions compute, and what they refuse, without a GPU."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.backends.full.forests import dense
from tests.backends.full.packed_fakes import packed_attention

OURS = ("harts.backends.full.tree.kernel", "harts.backends.full.tree.hopper")
"""Import the library."""
BLOCK = (2, 1, 0)
"""Tile, head and sequence of the thread block that runs."""


class BlockSparse(NamedTuple):
    """`BlockSparseTensorsTorch`."""

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor
    block_size: tuple[int, int]


def seen_by(lists: Any, size: tuple[int, int], intervals: Tensor, by: int) -> Tensor:
    """Times that a kernel that walks the lists lets each query see each key: whole tiles, and masked ones by places.

    Args:
        lists: tiles of keys of each tile of queries, or of queries of each of keys.
        size: queries and keys of a tile.
        intervals: places of all rows, and how many rows see them, up to whole tiles.
        by: 0 where tiles are listed by those of queries, 1 where by those of keys.
    """
    enter, seeing = intervals[:-128].T
    masked = (enter[None, :] <= enter[:, None]) & (enter[:, None] < (enter + seeing)[None, :])
    seen = torch.zeros(masked.shape, dtype=torch.int64)
    for partial, counts, indices in (
        (True, lists.partial_count, lists.partial_index),
        (False, lists.full_count, lists.full_index),
    ):
        assert counts.dtype == indices.dtype == torch.int32
        assert counts.shape == (1, 1, -(-masked.shape[by] // size[by]))
        for one, count in enumerate(counts[0, 0].tolist()):
            others = indices[0, 0, one, :count].tolist()
            assert others == sorted(set(others))
            for other in others:
                query, key = (one, other) if by == 0 else (other, one)
                part = (
                    slice(query * size[0], (query + 1) * size[0]),
                    slice(key * size[1], (key + 1) * size[1]),
                )
                seen[part] += masked[part].long() if partial else 1
    return seen


def read_intervals(address: int, rows: int) -> Tensor:
    """What a kernel reads of rows and of a tile past them, int32, [rows + 128, 2]."""
    numbers = (ctypes.c_int32 * (2 * (rows + 128))).from_address(address)
    return torch.tensor(numbers, dtype=torch.int32).view(-1, 2)


def flash_attn_func(  # noqa: PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    mask_mod: Any,
    aux_scalars: tuple[int],
    block_sparse_tensors: BlockSparse,
    block_sparse_tensors_bwd: BlockSparse,
) -> tuple[Tensor, None]:
    assert mask_mod.__name__ == "sees"
    made = flash_fwd_sm90().SingleTileScheduler.create(SimpleNamespace(num_block=9))
    assert made.block != BLOCK
    assert len(q) == len(k) == len(v) == 1
    intervals = read_intervals(*aux_scalars, rows=q.shape[1])
    both = (block_sparse_tensors, block_sparse_tensors_bwd)
    seen, backward = (seen_by(lists, lists.block_size, intervals, by) for by, lists in enumerate(both))
    assert seen.max() == 1
    assert torch.equal(seen, backward)
    return dense(q[0], k[0], v[0], seen.bool(), softmax_scale)[None], None


def flash_fwd_sm90() -> Any:
    """The module of forward kernels that is in place."""
    return sys.modules["flash_attn.cute"].flash_fwd_sm90


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    **settings: Any,
) -> tuple[Tensor, None]:
    assert settings["causal"]
    return packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale), None


class SingleTileScheduler:
    """Which thread block of a grid runs."""

    def __init__(self, params: Any, block: tuple[int, int, int], *, loc: Any, ip: Any) -> None:
        self.params, self.block = params, block

    @staticmethod
    def create(params: Any, _state: Any = None, *, loc: Any = None, ip: Any = None) -> SingleTileScheduler:
        return SingleTileScheduler(params, BLOCK, loc=loc, ip=ip)


def consume_block_sparse_mma_bwd_sm90(*given: Any, **settings: Any) -> tuple[Any, ...]:
    """What it was given."""
    return given, settings


def put_in_place(patch: pytest.MonkeyPatch) -> None:
    """Let the modules that import FlashAttention 4 import this instead."""
    everything: dict[str, dict[str, Any]] = {
        "cutlass": {
            **dict.fromkeys(("Boolean", "Int32", "Int64", "Uint32"), int),
            "cute": _module("cute", jit=lambda function: function, arch=_module("arch", block_idx=lambda: BLOCK)),
            "range": lambda count, unroll: range(count),
            "min": min,
        },
        "cutlass._mlir.dialects": {"llvm": None},
        "cutlass.cutlass_dsl": {"T": None},
        "flash_attn.cute": {
            "utils": None,
            "flash_bwd_sm90": _module("bwd", consume_block_sparse_mma_bwd_sm90=consume_block_sparse_mma_bwd_sm90),
            "flash_fwd_sm90": _module("fwd", SingleTileScheduler=SingleTileScheduler),
        },
        "flash_attn.cute.tile_scheduler": {"SingleTileScheduler": SingleTileScheduler},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparse},
        "flash_attn.cute.interface": {each.__name__: each for each in (flash_attn_func, flash_attn_varlen_func)},
    }
    for name, content in everything.items():
        patch.setitem(sys.modules, name, _module(name, **content))
    for name in OURS:
        patch.setitem(sys.modules, name, None)  # so that the module before, or none, comes back
        del sys.modules[name]


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made
