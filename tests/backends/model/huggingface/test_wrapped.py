"""Modules that are not run as they are, replaced, wrapped or compiled, are refused by name."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.huggingface.family import family_named
from harts.backends.model.huggingface.hooks import TreeForward
from harts.errors import BackendError
from tests.backends.model.huggingface.models import CHUNK, OVERRIDES, WITH_EXPERTS, handed_over, tiny
from tests.backends.model.huggingface.runs import compact, forest
from tests.parity.trees import layout_of

LAYOUT = layout_of(forest(0), CHUNK)


def _why_not(model: HuggingFace) -> list[str]:
    return model.why_not(model.need(CHUNK))


@pytest.mark.parametrize("family", sorted(OVERRIDES))
def test_attention_with_a_forward_of_its_own_is_refused_and_kept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = family_named(family)
    for each in (described.delta_rule, described.conv):  # in torch, also where FLA is installed
        monkeypatch.setattr(described.modeling, each, inspect.unwrap(getattr(described.modeling, each)))
    module = tiny(family).module
    (name, layer), (other, _) = [
        (name, each)
        for name, each in module.named_modules()
        if isinstance(vars(each).pop("forward", None), TreeForward)
    ][:2]
    layer.forward = own = partial(type(layer).forward, layer)
    model = handed_over(module)
    assert _why_not(model) == [
        f"modules with a forward of their own, which does not know the plan: {name} ({type(layer).__name__})"
    ]
    assert layer.forward is own
    assert vars(module.get_submodule(other))["forward"]
    with pytest.raises(BackendError, match="did not run on compact rows: 0"):
        compact(model, LAYOUT)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_routers_and_what_holds_them_with_a_forward_of_their_own_are_refused(family: str) -> None:
    """Checkpointing of experts alone, for instance, which would run them again without the plan."""
    module = tiny(family).module
    mlps = [layer.mlp for layer in module.model.layers]
    mlps[2].gate.forward = partial(type(mlps[2].gate).forward, mlps[2].gate)
    for part in (mlps[1], mlps[1].experts, module.model.layers[2]):
        part.forward = partial(type(part).forward, part)
    names = f"model.layers.1.mlp ({type(mlps[1]).__name__}), model.layers.2.mlp.gate ({type(mlps[2].gate).__name__})"
    reason = f"modules with a forward of their own, which does not know the plan: {names}"
    assert _why_not(handed_over(module)) == [reason]


@pytest.mark.parametrize(
    ("family", "change", "names"),
    [
        ("qwen3_5", lambda lm: lm.model.layers[1].compile(), "model.layers.1 (Qwen3_5DecoderLayer)"),
        ("qwen3_5", lambda lm: lm.model.layers[0].linear_attn.compile(), "model.layers.0.linear_attn (Qwen3_5GatedDe"),
        ("qwen3_5", lambda lm: lm.model.compile(), "model (Qwen3_5TextModel)"),
        ("kimi_linear", lambda lm: lm.model.layers[2].mlp.compile(), "model.layers.2.mlp (KimiLinearMoE)"),
        ("qwen3_next", lambda lm: lm.model.layers[0].mlp.shared_expert_gate.compile(), "model.layers.0.mlp.shared_ex"),
        (
            "qwen3_5",
            lambda lm: lm.model.layers.__setitem__(2, torch.compile(lm.model.layers[2])),
            "model.layers.2 (OptimizedModule)",
        ),
    ],
)
def test_compiled_modules_that_hold_hooks_are_refused(family: str, change: Any, names: str) -> None:
    """What holds none may be compiled."""
    model = tiny(family)
    layer = model.module.model.layers[1]
    layer.input_layernorm.compile()
    (layer.mlp if family == "qwen3_5" else layer.mlp.experts).compile()
    model.module.compile()
    assert not _why_not(model)
    change(model.module)
    (reason,) = _why_not(model)
    assert reason.startswith(f"compiled modules, through which torch cannot trace a call with a plan: {names}")


class _Adapted(nn.Module):
    """As libraries of adapters wrap a head: it shows the weight of what it wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = 2.0 * self.base(x)
        return logits


def _hook(module: Any, *_: Any) -> None:
    """Does nothing."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lm: setattr(lm, "lm_head", _Adapted(lm.lm_head)), "is a _Adapted, not a torch.nn.Linear"),
        (lambda lm: setattr(lm.lm_head, "bias", nn.Parameter(torch.zeros(24))), "has a bias"),
        (lambda lm: lm.lm_head.register_forward_hook(_hook), "has hooks, which would not be called"),
        (lambda lm: lm.lm_head.register_forward_pre_hook(_hook), "has hooks, which would not be called"),
        (lambda lm: lm.lm_head.register_full_backward_hook(_hook), "has hooks, which would not be called"),
        (lambda lm: lm.lm_head.register_full_backward_pre_hook(_hook), "has hooks, which would not be called"),
        (lambda lm: setattr(lm.lm_head, "forward", _hook), "has a forward of its own, which would not be called"),
    ],
)
def test_a_head_that_is_more_than_its_weight_is_refused(change: Any, reason: str) -> None:
    model = tiny("qwen3_5")
    assert model.head_weight() is model.module.lm_head.weight
    change(model.module)
    assert _why_not(model) == [f"its LM head {reason}"]
    with pytest.raises(BackendError, match=f"model: its LM head {reason}"):
        model.head_weight()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lm: lm.register_forward_hook(_hook), "has hooks, which would not be called"),
        (lambda lm: setattr(lm, "forward", _hook), "has a forward of its own, which would not be called"),
    ],
)
def test_what_belongs_to_calls_of_the_whole_model_is_refused(change: Any, reason: str) -> None:
    """Its parts are called, so that a wrapper for mixed precision, for instance, would have no effect."""
    model = tiny("qwen3_5")
    change(model.module)
    assert _why_not(model) == [f"the model {reason}"]
