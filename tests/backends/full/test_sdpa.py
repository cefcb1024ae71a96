import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harts.backends.full.sdpa import Sdpa
from harts.registry import resolve
from harts.stages.base import StageConfig
from tests.backends.full.forests import THREE_LEVELS, Branches, dense, random_branches, views_of, visibility
from tests.backends.full.packed_fakes import need

SHAPES = {
    "mha": (4, 4, 8, 8),
    "gqa": (4, 2, 8, 8),
    "mqa": (3, 1, 6, 6),
    "mla": (2, 2, 12, 8),
    "wide_value": (2, 2, 4, 10),
}
"""H, G, Dk, Dv."""


def make(rows: int, shape: tuple[int, int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, heads, key_dim), (rows, groups, key_dim), (rows, groups, value_dim))
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in sizes)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, branches: Branches, padding: int = 0) -> Tensor:
    return Sdpa(StageConfig()).attend(q, k, v, views_of(branches, padding), 0.37)


def assert_matches_dense(branches: Branches, shape: tuple[int, int, int, int]) -> None:
    rows = sum(length for _, length in branches)
    inputs = make(rows, shape)
    out, wanted = attend(*inputs, branches), dense(*inputs, visibility(branches, rows), 0.37)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-13)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, expected = (torch.autograd.grad(each, inputs, weight) for each in (out, wanted))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_is_registered() -> None:
    assert resolve("full_attention", "sdpa") is Sdpa


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_three_levels_match_dense_attention_over_visible_rows(shape: tuple[int, int, int, int]) -> None:
    assert_matches_dense(THREE_LEVELS, shape)


def test_visibility_of_three_levels_is_as_drawn() -> None:
    seen = visibility(THREE_LEVELS, 19)
    p, a, r0, b, r2, r1, r3 = (
        set(range(*each)) for each in ((3,), (3, 5), (5, 9), (9, 12), (12, 14), (14, 17), (17, 19))
    )
    for leaf, path in ((r0, p | a | r0), (r1, p | a | r1), (r2, p | b | r2), (r3, p | b | r3)):
        assert set(seen[max(leaf)].nonzero().flatten().tolist()) == path


@pytest.mark.parametrize("seed", range(12))
def test_random_forests_match_dense_attention(seed: int) -> None:
    rng = random.Random(seed)
    assert_matches_dense(random_branches(rng), rng.choice(list(SHAPES.values())))


@pytest.mark.parametrize("follows", [0, 30, 69])
@pytest.mark.parametrize("rows", [1, 2, 33, 128])
def test_long_branches_match_dense_attention(follows: int, rows: int) -> None:
    assert_matches_dense([(-1, 70), (follows, rows)], SHAPES["gqa"])


def test_single_token_trajectory_sees_itself_alone() -> None:
    q, k, v = make(1, SHAPES["mha"])
    torch.testing.assert_close(attend(q, k, v, [(-1, 1)]), v, rtol=1e-15, atol=0)


def test_padding_rows_are_zero_and_reach_nothing() -> None:
    q, k, v = make(19 + 5, SHAPES["mla"])
    with torch.no_grad():
        for each in (q, k, v):
            each[19:] = torch.nan
    out = attend(q, k, v, THREE_LEVELS, padding=5)
    assert out.shape == (24, 2, 8)
    assert torch.equal(out[19:], torch.zeros(5, 2, 8, dtype=torch.float64))
    assert torch.equal(out[:19], attend(q[:19], k[:19], v[:19], THREE_LEVELS))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(grad[19:], torch.zeros_like(grad[19:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_of_one_branch_change_no_bit_of_another(dtype: torch.dtype) -> None:
    inputs = [each.detach().to(dtype) for each in make(19, SHAPES["gqa"])]
    before = attend(*inputs, THREE_LEVELS)
    for each in inputs:
        each[14:17] *= -3  # R1
    after = attend(*inputs, THREE_LEVELS)
    others = [row for row in range(19) if not 14 <= row < 17]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[14:17], after[14:17])


def test_neither_scores_nor_masks_of_a_long_branch_are_kept() -> None:
    """2000 rows with 1000 ancestors see four million pairs: nothing kept for backward may have a byte for each."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    inputs = [each.detach().requires_grad_() for each in make(3000, SHAPES["gqa"])]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(*inputs, [(-1, 1000), (999, 2000)])
    assert 0 < max(saved) < 4_000_000


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cost_is_what_torch_is_given(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all keys and values together, and products of all pairs of a query and a key."""
    attention, memory, pairs = functional.scaled_dot_product_attention, {}, []

    def watched(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        memory.update({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (k, v)})
        queries, keys = q.shape[2], k.shape[2]
        pairs.append(queries * (queries + 1) // 2 if queries == keys else queries * keys)
        dims.add((k.shape[3], v.shape[3]))
        return attention(q, k, v, **given)

    dims: set[tuple[int, int]] = set()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    out = attend(*make(19, shape), THREE_LEVELS)  # its graph holds what was given
    ((key_dim, value_dim),) = dims
    flops = 2 * sum(pairs) * shape[0] * (4 * key_dim + 3 * value_dim)
    asked = need(dtype=torch.float64, full_heads=shape[:2], full_head_dims=shape[2:])
    assert Sdpa(StageConfig()).cost(views_of(THREE_LEVELS), asked) == (sum(memory.values()), flops)
    assert out.requires_grad


@pytest.mark.parametrize("seed", range(8))
def test_views_list_what_is_seen(seed: int) -> None:
    branches = random_branches(random.Random(seed))
    views, rows = views_of(branches), sum(length for _, length in branches)
    seen = visibility(branches, rows)
    assert views.pairs == int(seen.sum())
    for i, last in enumerate(views.cu_q[1:] - 1):
        keys = views.key_row[views.cu_k[i] : views.cu_k[i + 1]].tolist()
        assert sorted(keys) == seen[last].nonzero().flatten().tolist()
        assert keys[-1] == last


def test_why_not_gives_every_reason() -> None:
    backend = Sdpa(StageConfig())
    assert backend.why_not(need()) == []
    reasons = backend.why_not(need(dtype=torch.int32, full_heads=(4, 3), full_head_dims=(0, 8)))
    assert len(reasons) == 3
    assert "torch.int32" in reasons[0]
    assert "4 query heads" in reasons[1]
    assert "(0, 8)" in reasons[2]
