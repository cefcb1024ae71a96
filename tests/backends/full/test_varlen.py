"""Torch's packed attention: what it is called with, in the versions of its signature, and what it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.full import varlen
from harts.backends.full.sdpa import Sdpa
from harts.backends.full.varlen import Varlen, padded_dim, parameters
from harts.registry import resolve
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, views_of
from tests.backends.full.packed_fakes import SHAPES, draw, need, packed_attention


def newer(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def older(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert scale is not None
    mask = {(-1, 0): "bottom right", (-1, -1): "none"}[window_size]
    return packed_attention(query, key, value, cu_seq_q, cu_seq_k, scale, mask)


def oldest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # noqa: PLR0917
    raise AssertionError


@pytest.fixture(autouse=True)
def signature_is_read_anew() -> Iterator[None]:
    parameters.cache_clear()
    yield
    parameters.cache_clear()


def serve(function: Any, monkeypatch: pytest.MonkeyPatch) -> Varlen:
    monkeypatch.setattr(varlen, "varlen_attn", lambda: function)
    return Varlen(StageConfig())


def test_is_registered() -> None:
    assert resolve("full_attention", "varlen") is Varlen


@pytest.mark.parametrize("function", [older, newer])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2, 1, 6, 3)], ids=str)
def test_equals_the_oracle(function: Any, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, views = serve(function, monkeypatch), views_of(THREE_LEVELS, 2)
    inputs = draw(views.rows, shape)
    results = []
    for each in (backend, Sdpa(StageConfig())):
        out = each.attend(*inputs, views, 0.37)
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, weight)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


def test_the_installed_function_takes_what_it_is_called_with() -> None:
    if varlen.varlen_attn() is None:
        pytest.skip("this torch has no varlen_attn")
    assert {"scale", "window_size"} <= parameters()


def test_padded_channels_count_as_cost() -> None:
    assert [padded_dim(192, 128), padded_dim(64, 128), padded_dim(60, 60)] == [192, 128, 64]
    backend, views = Varlen(StageConfig()), views_of(THREE_LEVELS)
    assert backend.cost(views, need(full_head_dims=(192, 128))) == backend.cost(views, need(full_head_dims=(192, 192)))
    in_order = views_of([(-1, 600), (-1, 600)])  # keys are the compact ones, values are copied to be padded
    asked = need(full_heads=(2, 2), full_head_dims=(192, 128))
    assert backend.cost(in_order, asked).expanded_bytes == 1200 * 2 * 192 * 2


def test_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = serve(oldest, monkeypatch).why_not(need(dtype=torch.float32, full_head_dims=(264, 8)))
    assert len(reasons) == 4
    assert "float32" in reasons[0]
    assert "CUDA" in reasons[1]
    assert f"torch {torch.__version__} takes no scale and no window_size" in reasons[2]
    assert "(264, 8)" in reasons[3]


def test_a_torch_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "MODULE", "torch.nn.attention.no_such_module")
    assert varlen.varlen_attn() is None
    assert any("takes no scale" in reason for reason in Varlen(StageConfig()).why_not(need()))


def test_it_is_deterministic_where_torch_is_told_to_be() -> None:
    backend = Varlen(StageConfig())
    assert not backend.deterministic(need())
    try:
        torch.use_deterministic_algorithms(True)
        assert backend.deterministic(need())
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not backend.deterministic(need())
    finally:
        torch.use_deterministic_algorithms(False)
