"""FlashAttention 4 in plain torch: what its functions compute, and what they refuse, without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.backends.full.forests import dense
from tests.backends.full.packed_fakes import packed_attention

OURS = [f"harts.backends.full.tree.{name}" for name in ("kernel", "operator")]
"""Modules that import the library."""


class BlockSparse(NamedTuple):
    """`BlockSparseTensorsTorch`."""

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor
    block_size: tuple[int, int]


def seen_by(lists: Any, size: tuple[int, int], aux: list[Tensor], by: int) -> Tensor:
    """Times that a kernel that walks the lists lets each query see each key: whole tiles, and masked ones by places.

    Args:
        lists: tiles of keys of each tile of queries, or of queries of each of keys.
        size: queries and keys of a tile.
        aux: places of queries and intervals of keys.
        by: 0 where tiles are listed by those of queries, 1 where by those of keys.
    """
    places, intervals = (each.view(-1, 2)[:-128] for each in aux)
    (enter, _), (first, end) = places.T, intervals.T
    masked = (first[None, :] <= enter[:, None]) & (enter[:, None] < end[None, :])
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


def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **settings: Any) -> None:
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert lies_as_kernels_write(out) and lse.stride(-1) == 1
    scale = settings.pop("softmax_scale")
    seen = _seen(settings, len(q), 0)
    found = _attend(*_wide(q, k, v), seen, scale)
    out.copy_(found[0].view(out.shape))
    lse.copy_(found[1].view(lse.shape))


def _flash_attn_bwd(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **settings: Any
) -> None:
    written = [settings.pop(name) for name in ("dq", "dk", "dv")]
    for one, other in zip((q, k, v, out), (*written, dout), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
    assert all(map(lies_as_kernels_write, written))
    scale = settings.pop("softmax_scale")
    inputs = _wide(q, k, v)
    seen = _seen(settings, len(q), 1)
    with torch.enable_grad():
        leaves = [each.requires_grad_() for each in inputs]
        found = _attend(*leaves, seen, scale)
        grads = torch.autograd.grad(found[0], leaves, dout.double().view(found[0].shape))
    assert torch.equal(found[0].to(out.dtype), out.view(found[0].shape))
    assert torch.equal(found[1].float(), lse.view(found[1].shape))
    for each, grad in zip(written, grads, strict=True):
        each.copy_(grad.view(each.shape))


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


def lies_as_kernels_write(x: Tensor) -> bool:
    apart = [stride * x.element_size() % 16 for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and not any(apart) and x.storage_offset() * x.element_size() % 16 == 0


def _seen(settings: dict[str, Any], queries: int, by: int) -> Tensor:
    """Which query sees which key; takes all settings away."""
    if "mask_mod" not in settings:
        assert settings.pop("causal") is True
        bounds = settings.pop("cu_seqlens_q")
        assert bounds.dtype == torch.int32 and bounds[-1] == queries
        assert torch.equal(bounds, settings.pop("cu_seqlens_k"))
        longest = int(bounds.diff().max())
        assert settings == {"max_seqlen_q": longest, "max_seqlen_k": longest}
        sequence = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        return (sequence[:, None] == sequence[None, :]).tril()
    assert settings.pop("mask_mod").__name__ == "sees"
    lists, aux = settings.pop("block_sparse_tensors"), settings.pop("aux_tensors")
    assert not settings and queries == 1
    seen = seen_by(lists, lists.block_size, aux, by)
    assert seen.max() == 1
    return seen.bool()


def _wide(*given: Tensor) -> list[Tensor]:
    """Without the batch dim, in float64."""
    return [each.detach().flatten(0, -3).double() for each in given]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs, and log-sum-exps of scores."""
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
    return dense(q, k, v, seen, scale), scores.masked_fill(~seen, -torch.inf).logsumexp(-1)


def put_in_place(patch: pytest.MonkeyPatch) -> None:
    """Let the modules that import FlashAttention 4 import this instead."""
    everything: dict[str, dict[str, Any]] = {
        "cutlass": {"Int32": int, "cute": _module("cute", jit=lambda function: function)},
        "cutlass._mlir.dialects": {"llvm": None},
        "cutlass.cutlass_dsl": {"T": None},
        "flash_attn.cute": {"utils": None},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparse},
        "flash_attn.cute.interface": {
            each.__name__: each for each in (_flash_attn_fwd, _flash_attn_bwd, flash_attn_varlen_func)
        },
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
