"""A trainer's model is checked when it is handed to `harts.load`, with every reason why it cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import harts
from harts.errors import ConfigError
from tests.backends.model.huggingface.models import tiny

PIPELINES = Path(__file__).resolve().parents[4] / "pipelines"


def _load(module: Any, *overrides: str) -> harts.Pipeline:
    return harts.load(PIPELINES / "trainer_huggingface.yaml", overrides, module=module)


def test_a_module_has_its_hooks_when_it_is_loaded() -> None:
    made = tiny("qwen3_5").module
    plain = type(made)(made.config)
    assert not any("forward" in vars(each) for each in plain.modules())
    _load(plain)
    assert sum("forward" in vars(each) for each in plain.modules()) == 3


def test_every_reason_is_told_at_once() -> None:
    module = tiny("kimi_linear", {"hidden_act": "gelu"}).module
    module.lm_head.register_forward_hook(lambda *_: None)
    module.model.drop = torch.nn.Dropout(0.5)
    with pytest.raises(ConfigError) as raised:
        _load(module, "layout.conv_width=3")
    told = str(raised.value).splitlines()
    assert [line.split("HuggingFace: ")[1] for line in told] == [
        "dropout in model.drop (p 0.5); a shared row has one outcome",
        "the short convolution of layers 0, 2 has activation gelu, not silu",
        "its LM head has hooks, which would not be called",
        "its conv_width is 4, but the layout prepares windows of 3",
    ]
    assert all("trainer_huggingface.yaml: models: " in line for line in told)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("layout.conv_width=3", "its conv_width is 4, but the layout prepares windows of 3"),
        ("linear_attention={type: kda}", "linear_attention: Kda: "),
        ("model.expert_bias_rate=0.1", "its routers have no selection bias"),
    ],
)
def test_a_module_that_is_refused_stays_as_it_was(override: str, text: str) -> None:
    made = tiny("qwen3_next").module
    plain = type(made)(made.config).train()
    before = [dict(vars(each)) for each in plain.modules()]
    with pytest.raises(ConfigError, match=text):
        _load(plain, override, "model.recompute=full")
    assert [dict(vars(each)) for each in plain.modules()] == before
    assert not any(each._forward_hooks for each in plain.modules())
    _load(plain, "model.recompute=full")
    assert all(layer.gradient_checkpointing for layer in plain.model.layers)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.experts=eager", "a model is handed over, and experts would make another one"),
        ("model.seed=5", "a model is handed over, and seed would make another one"),
        ("model.expert_bias_rate=0.1", "its routers have no selection bias"),
        ("device=meta", "the model handed over is on cpu, the pipeline's device is meta"),
    ],
)
def test_what_the_file_asks_for_is_checked(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _load(tiny("qwen3_5").module, override)


def test_a_module_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="no family has model_type 'None'"):
        _load(torch.nn.Linear(2, 2))


def test_a_file_that_runs_no_model_takes_no_module() -> None:
    with pytest.raises(ConfigError, match=r"plan_only.yaml: a model is handed over, and there is no section model"):
        harts.load(PIPELINES / "plan_only.yaml", module=tiny("qwen3_5").module)


def test_a_model_that_builds_its_own_module_takes_none() -> None:
    with pytest.raises(ConfigError, match="models: Reference: builds its own module and takes none"):
        harts.load(PIPELINES / "quickstart.yaml", module=tiny("qwen3_5").module)
