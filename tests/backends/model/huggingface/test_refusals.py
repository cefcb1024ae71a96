"""What cannot run on compact rows is refused by name: nothing runs beside the plan unnoticed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harts.backends.model.huggingface import backend
from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.huggingface.call import LayerCall
from harts.backends.model.huggingface.family import family_named
from harts.backends.model.huggingface.functions import delta_rule, tree_attention
from harts.errors import BackendError, InputError
from tests.backends.model.huggingface.models import CHUNK, OVERRIDES, config, tiny, wrapped
from tests.backends.model.huggingface.runs import compact, forest, tensors
from tests.parity.trees import layout_of

LAYOUT = layout_of(forest(0), CHUNK)


def _as_family(monkeypatch: pytest.MonkeyPatch, family: str = "qwen3_5", **changes: Any) -> None:
    changed = replace(family_named(family), **changes)
    monkeypatch.setattr(backend, "family_of", lambda _: changed)


def _why_not(model: HuggingFace) -> list[str]:
    return model.why_not(model.need(CHUNK))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("repeat_kv", "Qwen3_5GatedDeltaNet.forward does not call repeat_kv; its family is not served"),
        (
            "chunk_kimi_delta_attention",
            "Qwen3_5GatedDeltaNet.forward does not call chunk_kimi_delta_attention; its family is not served",
        ),
    ],
)
def test_a_name_that_no_layer_calls_is_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_family(monkeypatch, delta_rule=name)
    model = wrapped(config("qwen3_5"))
    assert _why_not(model) == [text]
    with pytest.raises(BackendError, match=text):
        compact(model, LAYOUT)


def test_a_layer_that_runs_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_named("qwen3_5")
    plain = torch.zeros_like
    monkeypatch.setattr(family.modeling, family.delta_rule, lambda _q, _k, value, **_others: (plain(value), None))
    _as_family(monkeypatch, delta_rule="torch_recurrent_gated_delta_rule")  # in its code, not called in training
    with pytest.raises(BackendError, match=r"did not run on compact rows: 0 \(linear_attention\), 2 \(linear_att"):
        compact(wrapped(config("qwen3_5")), LAYOUT)


@pytest.mark.parametrize("family", sorted(OVERRIDES))
def test_a_layer_whose_convolution_is_another_function_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = family_named(family)
    monkeypatch.setattr(described.modeling, described.conv, inspect.unwrap(getattr(described.modeling, described.conv)))
    _as_family(monkeypatch, family, conv="causal_conv1d_update")  # in its code, not called in training
    with pytest.raises(BackendError, match=r"rows: 0 \(short convolution\), 2 \(short convolution\)$"):
        compact(wrapped(config(family)), LAYOUT)


def test_layers_of_another_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_family(monkeypatch, full_layer="Qwen3NextAttention")
    with pytest.raises(BackendError, match=r"1 \(full_attention\)"):
        compact(wrapped(config("qwen3_5")), LAYOUT)


def test_a_layer_whose_forward_is_replaced_is_refused() -> None:
    model = tiny("qwen3_next")
    layers = model.module.model.layers
    layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    layers[2].linear_attn.forward = lambda hidden_states, **_: hidden_states
    layers[0].mlp.gate = torch.nn.Identity()
    layers[0].mlp.forward = lambda hidden_states: hidden_states
    with pytest.raises(BackendError) as raised:
        compact(model, LAYOUT)
    assert "1 (full_attention), 2 (linear_attention), 2 (short convolution)" in str(raised.value)


def test_experts_that_do_not_run_are_refused() -> None:
    model = tiny("kimi_linear")
    model.module.model.layers[2].mlp.forward = lambda hidden_states: hidden_states
    with pytest.raises(BackendError, match=r"did not run on compact rows: 2 \(experts\)"):
        compact(model, LAYOUT)


@pytest.mark.parametrize(
    ("asks", "text"),
    [
        ({"dropout": 0.1}, r"dropout 0.1"),
        ({"sliding_window": 4}, r"sliding_window 4"),
        ({"softcap": 30.0}, r"softcap 30.0"),
        ({"sliding_window": 4, "dropout": 0.5}, r"sliding_window 4, dropout 0.5"),
    ],
)
def test_attention_that_asks_for_more_is_refused(asks: dict[str, Any], text: str) -> None:
    x, call = torch.zeros(1, 2, 5, 4), LayerCall(None, 3)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=rf"layer 3 \(SimpleNamespace\): asks for {text};"):
        tree_attention(SimpleNamespace(), x, x, x, None, tree_call=call, **asks)


def test_an_attention_mask_is_refused() -> None:
    x, call = torch.zeros(1, 2, 5, 4), LayerCall(None, 3)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=r"layer 3 .*an attention mask"):
        tree_attention(SimpleNamespace(), x, x, x, torch.zeros(5, 5), tree_call=call)


def test_a_cache_of_states_is_refused() -> None:
    x, call = torch.zeros(1, 5, 2, 4), LayerCall(None, 4)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="layer 4: has a cache"):
        delta_rule(x, x, x, g=x, beta=x[..., 0], tree_call=call, output_final_state=True)


def test_dropout_of_one_layer_is_refused_by_its_name() -> None:
    model = tiny("qwen3_5")
    model.module.model.layers[1].self_attn.attention_dropout = 0.25
    with pytest.raises(BackendError, match=r"layer 1 \(Qwen3_5Attention\): asks for dropout 0.25"):
        compact(model, LAYOUT)


@pytest.mark.parametrize("family", sorted(OVERRIDES))
def test_another_short_convolution_is_refused(family: str) -> None:
    model = tiny(family)
    layers = [each for each in model.module.modules() if type(each).__name__ == model.family.linear_layer]
    assert [each.layer_idx for each in layers] == [0, 2]
    layers[0].activation = layers[1].activation = "gelu"
    layers[1].conv1d.bias = torch.nn.Parameter(torch.zeros(layers[1].conv1d.out_channels))
    assert _why_not(model) == [
        "the short convolution of layers 0, 2 has activation gelu, not silu",
        "the short convolution of layers 2 has a bias",
    ]
    with pytest.raises(BackendError, match="layer 0: its short convolution has activation gelu, not silu"):
        compact(model, LAYOUT)
    layers[0].activation = "silu"
    with pytest.raises(BackendError, match="layer 2: its short convolution has a bias and activation gelu, not silu"):
        compact(model, LAYOUT)


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.AlphaDropout, nn.Dropout1d])
def test_dropout_anywhere_is_refused_by_its_path(dropout: type[nn.Module]) -> None:
    model = tiny("qwen3_5")
    layers = model.module.model.layers
    layers[1].mlp.up_proj = nn.Sequential(layers[1].mlp.up_proj, dropout(0.25))
    layers[2].mlp.drop = dropout(0.0)
    assert _why_not(model) == ["dropout in model.layers.1.mlp.up_proj.1 (p 0.25); a shared row has one outcome"]
    with pytest.raises(BackendError, match=r"^model: dropout in model\.layers\.1\.mlp\.up_proj\.1 \(p 0\.25\)"):
        compact(model, LAYOUT)
    for layer in layers:
        layer.drop = dropout(0.5)
    paths = "model.layers.0.drop (p 0.5), model.layers.1.mlp.up_proj.1 (p 0.25), model.layers.1.drop (p 0.5)"
    assert _why_not(model) == [f"dropout in {paths} and 1 more; a shared row has one outcome"]


@pytest.mark.parametrize(
    ("family", "changes", "fields", "text"),
    [
        ("qwen3_5", {"attention_dropout": 0.1}, {}, "attention_dropout is 0.1"),
        ("qwen3_5", {}, {"expert_bias_rate": 0.1}, "expert_bias_rate is 0.1; its routers have no selection bias"),
        ("qwen3_next", {}, {"expert_bias_rate": 0.1}, "expert_bias_rate is 0.1; its routers have no selection bias"),
        (
            "bailing_hybrid",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "rope_type dynamic depends on the longest trajectory",
        ),
    ],
)
def test_a_model_says_why_it_cannot_serve(
    family: str, changes: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    model = wrapped(config(family, changes, **fields))
    (reason,) = _why_not(model)
    assert text in reason


@pytest.mark.parametrize("family", sorted(OVERRIDES))
def test_unchanged_models_serve(family: str) -> None:
    model = tiny(family)
    assert not _why_not(model)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    layout = layout_of([[1, 2, 3], [1, 2, 31]], CHUNK)
    with pytest.raises(InputError, match=r"position 2\) is token 31, but the model's vocab_size is 24"):
        tiny("qwen3_5").forward(tensors(layout))
