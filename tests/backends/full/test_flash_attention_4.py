"""FlashAttention 4: what it is called with, and what it refuses."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from harts.backends.full import flash_attention_4
from harts.backends.full.flash_attention_4 import FlashAttention4
from harts.backends.full.packed import import_faults
from harts.backends.full.sdpa import Sdpa
from harts.registry import resolve
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, views_of
from tests.backends.full.packed_fakes import SHAPES, draw, need, packed_attention


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a plain function in the library's place, and lists its calls."""
    found: list[dict[str, Any]] = []

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, **settings):
        found.append(settings)
        mask = "bottom right" if settings["causal"] else "none"
        return packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, mask), None

    module = ModuleType("interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_varlen_fake", module)
    monkeypatch.setattr(flash_attention_4, "MODULE", "flash_attn_varlen_fake")
    return found


def backend(**config: bool) -> FlashAttention4:
    return FlashAttention4(FlashAttention4.Config(**config))


def machine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_is_registered() -> None:
    assert resolve("full_attention", "flash_attention_4") is FlashAttention4


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_equals_the_oracle(deterministic: bool, shape: Any, calls: list[dict[str, Any]]) -> None:
    views = views_of(THREE_LEVELS, 2)
    inputs = draw(views.rows, shape)
    results = []
    for each in (backend(deterministic=deterministic), Sdpa(StageConfig())):
        out = each.attend(*inputs, views, 0.37)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, weight)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
    assert calls == [{"max_seqlen_q": 9, "max_seqlen_k": 9, "causal": True, "deterministic": deterministic}]


def test_is_deterministic_as_the_config_says() -> None:
    assert backend(deterministic=True).deterministic(need())
    assert not backend().deterministic(need())


def test_torchs_deterministic_algorithms_need_the_config(calls: list[dict[str, Any]], monkeypatch: Any) -> None:
    machine(monkeypatch, (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    asked = need(device="cuda", dtype=torch.bfloat16, full_head_dims=(128, 128))
    assert backend(deterministic=True).why_not(asked) == []
    assert backend().why_not(asked) == [
        "torch.use_deterministic_algorithms asked for deterministic kernels, and it sums gradients in any order"
    ]


def test_every_reason_is_given() -> None:
    if not import_faults(flash_attention_4.MODULE, "fa4"):
        pytest.skip("the package is installed here")
    reasons = backend().why_not(need(dtype=torch.float32, full_head_dims=(20, 264)))
    assert len(reasons) == 4
    assert "float32" in reasons[0]
    assert "CUDA" in reasons[1]
    assert "pip install 'harts[fa4]'" in reasons[2]
    assert "(20, 264)" in reasons[3]


def test_grouped_heads_of_two_dims_are_refused_on_hopper(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mla = need(device="cuda", full_heads=(16, 2), full_head_dims=(192, 128))
    machine(monkeypatch, (9, 0))
    (reason,) = backend().why_not(mla)
    assert "grouped heads (16 over 2)" in reason and "(192, 128)" in reason
    machine(monkeypatch, (8, 0))
    (reason,) = backend().why_not(mla)
    assert "needs compute capability 9.0" in reason


@pytest.mark.parametrize("dims", [(64, 128), (56, 72), (128, 32), (96, 8), (256, 192)], ids=str)
def test_head_dims_that_backward_kernels_do_not_have_are_refused_on_hopper(
    dims: tuple[int, int], calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = need(device="cuda", full_heads=(16, 16), full_head_dims=dims)
    machine(monkeypatch, (9, 0))
    (reason,) = backend().why_not(asked)
    assert "equal head dims, or values of 64 or 128 under wider keys" in reason and str(dims) in reason
    machine(monkeypatch, (10, 0))
    assert backend().why_not(asked) == []


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((16, 16), (192, 128)),
        ((16, 2), (128, 128)),
        ((4, 1), (64, 64)),
        ((4, 4), (96, 64)),
        ((4, 4), (40, 40)),
        ((4, 4), (256, 128)),
    ],
    ids=str,
)
def test_it_has_no_reason_against_these(
    heads: tuple[int, int], dims: tuple[int, int], calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, (9, 0))
    assert backend().why_not(need(device="cuda", full_heads=heads, full_head_dims=dims)) == []
