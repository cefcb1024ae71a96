"""Transformer Engine: what it is called with, in which sizes, and what it refuses."""

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.full import transformer_engine
from harts.backends.full.packed import import_faults, packed_views
from harts.backends.full.sdpa import Sdpa
from harts.backends.full.transformer_engine import (
    FUSED_ONLY,
    TransformerEngine,
    bucketed_views,
    environment,
    length_bucket,
    sequence_bucket,
)
from harts.registry import resolve
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, views_of
from tests.backends.full.packed_fakes import SHAPES, draw, need, packed_attention

NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


class DotProductAttention:
    """Stands in for the library's module."""

    made: list["DotProductAttention"]

    def __init__(self, heads: int, dims: tuple[int, int], **settings: Any) -> None:
        self.heads, self.dims, self.settings = heads, dims, settings
        self.deterministic = os.environ[NONDETERMINISTIC] == "0"
        self.calls: list[dict[str, Any]] = []
        self.made.append(self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q, cu_seqlens_kv, **sizes: int) -> Tensor:
        assert all(os.environ[name] == value for name, value in FUSED_ONLY.items())
        assert (q.shape[1], q.shape[2], v.shape[2]) == (self.heads, *self.dims)
        assert k.shape[1] == self.settings["num_gqa_groups"]
        self.calls.append({"sequences": len(cu_seqlens_q) - 1, **sizes})
        mask = {"padding_causal_bottom_right": "bottom right"}[self.settings["attn_mask_type"]]
        out = packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, self.settings["softmax_scale"], mask)
        return out.flatten(1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DotProductAttention]:
    """Modules that the backend made."""
    module = ModuleType("pytorch")
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine_fake", module)
    monkeypatch.setattr(transformer_engine, "MODULE", "transformer_engine_fake")
    DotProductAttention.made = []
    return DotProductAttention.made


def backend(**config: bool) -> TransformerEngine:
    return TransformerEngine(TransformerEngine.Config(**config))


def machine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_is_registered() -> None:
    assert resolve("full_attention", "transformer_engine") is TransformerEngine


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_oracle(shape: Any, made: list[DotProductAttention]) -> None:
    views = views_of(THREE_LEVELS, 2)
    inputs = draw(views.rows, shape)
    results = []
    for each in (backend(), Sdpa(StageConfig())):
        out = each.attend(*inputs, views, 0.37)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, weight)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
    assert made[0].settings["qkv_format"] == "thd"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_module_is_made_once_for_heads_dims_and_scale(
    deterministic: bool, made: list[DotProductAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NONDETERMINISTIC, raising=False)
    each = backend(deterministic=deterministic)
    views, inputs = views_of(THREE_LEVELS), draw(19, SHAPES["gqa"])
    for scale in (0.5, 0.5, 0.25):
        each.attend(*inputs, views, scale)
    assert [module.settings["softmax_scale"] for module in made] == [0.5, 0.25]
    assert [module.deterministic for module in made] == [deterministic] * 2
    assert NONDETERMINISTIC not in os.environ


def test_microbatches_of_near_sizes_have_equal_sizes_of_calls(made: list[DotProductAttention]) -> None:
    each = backend()
    for branches in ([(-1, 40)], [(-1, 3), (1, 100), (40, 7)], [(-1, 1)] * 32):
        each.attend(*draw(sum(rows for _, rows in branches), SHAPES["mha"]), views_of(branches), 1.0)
    (module,) = made
    assert module.calls == [{"sequences": 32, "max_seqlen_q": 128, "max_seqlen_kv": 128}] * 3


def test_sizes_are_rounded_up_and_empty_sequences_added_once() -> None:
    assert [sequence_bucket(n) for n in (1, 32, 33, 512, 513, 1025)] == [32, 32, 64, 512, 1024, 1536]
    assert [length_bucket(n) for n in (1, 128, 129, 65536, 65537)] == [128, 128, 256, 65536, 131072]
    views = views_of([(-1, 200), (150, 3)])
    packed, bucketed = packed_views(views), bucketed_views(views)
    assert bucketed_views(views) is bucketed
    assert bucketed.cu_q.tolist() == [0, 200, *[203] * 31]
    assert bucketed.cu_k.tolist() == [0, 200, *[354] * 31]
    assert bucketed.cu_q.dtype == torch.int32
    assert (packed.max_q, packed.max_k, bucketed.max_q, bucketed.max_k) == (200, 200, 256, 256)
    full = views_of([(-1, 2)] * 32)
    assert bucketed_views(full).cu_q.tolist() == packed_views(full).cu_q.tolist()


def test_environment_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARTS_TEST_SET", "before")
    monkeypatch.delenv("HARTS_TEST_UNSET", raising=False)
    with pytest.raises(KeyError), environment({"HARTS_TEST_SET": "1", "HARTS_TEST_UNSET": "2"}):
        assert (os.environ["HARTS_TEST_SET"], os.environ["HARTS_TEST_UNSET"]) == ("1", "2")
        raise KeyError
    assert os.environ["HARTS_TEST_SET"] == "before"
    assert "HARTS_TEST_UNSET" not in os.environ


def test_every_reason_is_given() -> None:
    if not import_faults(transformer_engine.MODULE, "te"):
        pytest.skip("the package is installed here")
    reasons = backend().why_not(need(dtype=torch.float32, full_head_dims=(20, 16)))
    assert len(reasons) == 4
    assert "float32" in reasons[0]
    assert "CUDA" in reasons[1]
    assert "pip install 'harts[te]'" in reasons[2]
    assert "(20, 16)" in reasons[3]


def test_determinism_is_refused_on_hopper(made: list[DotProductAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = need(device="cuda", full_heads=(16, 16), full_head_dims=(192, 128))
    machine(monkeypatch, (10, 0))
    assert backend(deterministic=True).why_not(asked) == []
    machine(monkeypatch, (9, 0))
    assert backend().why_not(asked) == []
    (reason,) = backend(deterministic=True).why_not(asked)
    assert reason.startswith("the config asked for deterministic kernels")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    (reason,) = backend().why_not(asked)
    assert reason.startswith("torch.use_deterministic_algorithms asked for")


def test_is_deterministic_as_the_config_or_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend(deterministic=True).deterministic(need())
    assert not backend().deterministic(need())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert backend().deterministic(need())
