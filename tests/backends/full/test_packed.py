"""Packed branches over expanded keys and values equal attention branch by branch."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.devices import capability
from harts.backends.full.packed import import_faults, machine_faults, packed_views, tile_pairs
from harts.backends.full.sdpa import Sdpa
from harts.backends.plan_tensors import AttentionViews
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, Branches, random_branches, views_of
from tests.backends.full.packed_fakes import SHAPES, Fake, TopLeft, draw, fake, need

Shape = tuple[int, int, int, int]


def attend_twice(backend: Fake, branches: Branches, shape: Shape, padding: int = 0) -> list[list[Tensor]]:
    """Outputs and gradients of the backend and of the oracle."""
    views = views_of(branches, padding)
    inputs = draw(views.rows, shape)
    results = []
    for each in (backend, Sdpa(StageConfig())):
        out = each.attend(*inputs, views, 0.37)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, weight)])
    return results


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_three_levels_equal_the_oracle(shape: Shape, padding: int) -> None:
    found, wanted = attend_twice(fake(), THREE_LEVELS, shape, padding)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(8))
def test_random_forests_equal_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    branches, shape = random_branches(rng), rng.choice(list(SHAPES.values()))
    found, wanted = attend_twice(fake(), branches, shape, padding=seed % 3)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_a_wrong_alignment_is_seen_by_these_tests() -> None:
    found, wanted = attend_twice(fake(TopLeft), THREE_LEVELS, SHAPES["mha"])
    assert not torch.allclose(found[0], wanted[0])


def test_padding_rows_are_zero_and_reach_nothing() -> None:
    q, k, v = draw(19 + 5, SHAPES["mla"])
    with torch.no_grad():
        for each in (q, k, v):
            each[19:] = torch.nan
    out = fake().attend(q, k, v, views_of(THREE_LEVELS, 5), 0.37)
    assert torch.equal(out[19:], torch.zeros(5, 2, 16, dtype=torch.float64))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad[:19].isfinite().all()
        assert torch.equal(grad[19:], torch.zeros_like(grad[19:]))


def test_without_padding_nothing_is_copied_around_the_kernel() -> None:
    class Watching(Fake):
        def _run(self, q, k, v, views, scale):
            self.given, self.gave = q, super()._run(q, k, v, views, scale)
            return self.gave

    backend = Watching(StageConfig())
    q, k, v = draw(19, SHAPES["gqa"])
    out = backend.attend(q, k, v, views_of(THREE_LEVELS), 1.0)
    assert backend.given is q
    assert out is backend.gave


def test_inputs_may_have_strides() -> None:
    class Strict(Fake):
        def _run(self, q, k, v, views, scale):
            assert q.stride(2) == 1 and k.is_contiguous() and v.is_contiguous()
            return super()._run(q, k, v, views, scale)

    inputs, views = draw(19, SHAPES["gqa"]), views_of(THREE_LEVELS)
    wanted = fake().attend(*inputs, views, 0.5)
    for strided in (
        [each.transpose(0, 1).contiguous().transpose(0, 1) for each in inputs],
        [each.transpose(1, 2).contiguous().transpose(1, 2) for each in inputs],
    ):
        assert torch.equal(Strict(StageConfig()).attend(*strided, views, 0.5), wanted)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_heads_are_split_where_a_tensor_would_be_too_large(groups: int) -> None:
    calls: list[tuple[int, int]] = []

    class Small(Fake):
        most_elements = 19 * 2 * 8 * groups + 7
        """19 queries in two heads of 8 channels are more than 33 keys in one."""

        def _run(self, q, k, v, views, scale):
            assert max(q.numel(), k.numel(), v.numel()) <= self.most_elements
            assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
            calls.append((q.shape[1], k.shape[1]))
            return super()._run(q, k, v, views, scale)

    found, wanted = attend_twice(Small(StageConfig()), THREE_LEVELS, (6, 3, 8, 8), padding=2)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    assert sum(count for _, count in calls) == 3
    assert all(heads == 2 * count for heads, count in calls)
    assert len(calls) == -(-3 // groups)


def test_a_head_that_is_too_large_is_refused_with_numbers() -> None:
    class Tiny(Fake):
        most_elements = 200

    with pytest.raises(ValueError, match="19 queries in 2 heads and 33 keys of 8 channels are 304 elements"):
        Tiny(StageConfig()).attend(*draw(19, SHAPES["gqa"]), views_of(THREE_LEVELS), 1.0)


def test_packed_views_are_made_once() -> None:
    views = views_of(THREE_LEVELS)
    packed = packed_views(views)
    assert packed_views(views) is packed
    assert packed.cu_q.tolist() == views.cu_q.tolist()
    assert packed.cu_k.tolist() == views.cu_k.tolist()
    assert packed.cu_q.dtype == packed.cu_k.dtype == torch.int32
    assert (packed.max_q, packed.max_k) == (9, 9)
    assert type(packed.max_q) is type(packed.max_k) is int


def test_more_keys_than_32_bits_count_are_refused() -> None:
    views = views_of([(-1, 4)])
    views.run_length[:] = 2**31
    with pytest.raises(ValueError, match="have 2147483648 keys in all"):
        packed_views(views)


@pytest.mark.parametrize(
    "branches", [THREE_LEVELS, [(-1, 130), (99, 300), (428, 1), (-1, 128)]], ids=["small", "large"]
)
def test_cost_counts_tiles(branches: Branches) -> None:
    views = views_of(branches)
    wanted = 0
    for queries, keys in zip(np.diff(views.cu_q).tolist(), np.diff(views.cu_k).tolist(), strict=True):
        for begin in range(0, queries, 128):
            last = keys - queries + min(begin + 128, queries)
            wanted += 128 * 128 * -(-last // 128)
    assert tile_pairs(views) == wanted >= views.pairs
    cost = fake().cost(views, need())
    assert cost.flops == 2 * wanted * 4 * (4 * 24 + 3 * 16)
    assert cost.expanded_bytes == int(views.cu_k[-1]) * 2 * (24 + 16) * 2


class Weighing(Fake):
    """Knows the bytes of the keys and values of its largest call that are not the given ones."""

    given: tuple[Tensor, ...] = ()
    held = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        self.given = (k, v)
        return super().attend(q, k, v, views, scale)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        known = {each.untyped_storage().data_ptr() for each in self.given}
        memory = [each.untyped_storage() for each in (k, v)]
        self.held = max(self.held, sum(each.nbytes() for each in memory if each.data_ptr() not in known))
        return super()._run(q, k, v, views, scale)


class OneDim(Weighing):
    def _head_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        return 24, 24


class FewHeads(Weighing):
    most_elements = 33 * 2 * 24
    """Two key/value heads a call, of three."""


class FewHeadsOfOneDim(OneDim, FewHeads):
    pass


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("branches", [THREE_LEVELS, [(-1, 19), (-1, 14)]], ids=["forks", "in order"])
@pytest.mark.parametrize("kind", [Weighing, OneDim, FewHeads, FewHeadsOfOneDim])
def test_expanded_bytes_are_those_that_a_call_holds(kind: type[Weighing], branches: Branches, padding: int) -> None:
    """Head dim 24 of keys needs no padding, 16 of values may."""
    backend, views = kind(StageConfig()), views_of(branches, padding)
    backend.attend(*draw(views.rows, (3, 3, 24, 16)), views, 1.0)
    asked = need(dtype=torch.float64, full_heads=(3, 3), full_head_dims=(24, 16))
    assert backend.cost(views, asked).expanded_bytes == backend.held


def test_costs_of_what_cannot_serve_are_told_too() -> None:
    views = views_of(THREE_LEVELS)
    for heads, dims in (((0, 0), (8, 8)), ((4, 4), (0, 0))):
        assert fake().cost(views, need(full_heads=heads, full_head_dims=dims)) == (0, 0)


def test_why_not_gives_every_reason() -> None:
    assert fake().why_not(need()) == []
    reasons = fake().why_not(need(dtype=torch.float32, full_heads=(4, 3), full_head_dims=(0, 8)))
    assert len(reasons) == 3
    assert "torch.float32 is not one of torch.bfloat16, torch.float16" in reasons[0]
    assert "4 query heads are not a positive multiple of 3" in reasons[1]
    assert "(0, 8)" in reasons[2]


def test_a_device_that_is_not_cuda_or_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capability("cpu") is None
    assert machine_faults(need(), (9, 0)) == ["it needs a CUDA device, the device is cpu"]
    assert machine_faults(need(device="cuda:99"), (9, 0)) == ["it needs a CUDA device, torch finds no cuda:99"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine_faults(need(device="cuda:2"), (8, 0)) == ["it needs a CUDA device, torch finds no cuda:2"]
    assert machine_faults(need(device="cuda:1"), (8, 0)) == []
    assert machine_faults(need(device="cuda"), (8, 0)) == []
    assert machine_faults(need(device="cuda"), (9, 0)) == [
        "it needs compute capability 9.0 or later, cuda has 8.6",
    ]


def test_a_package_that_cannot_be_imported_is_named_with_its_extra() -> None:
    assert import_faults("math", "te") == []
    (reason,) = import_faults("no_such_package.part", "te")
    assert reason == (
        "no_such_package.part cannot be imported (ModuleNotFoundError: No module named 'no_such_package'); "
        "pip install 'harts[te]'"
    )
