"""What the README shows works as shown."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harts.backends.model.huggingface.family import family_named
from harts.registry import BUILT_IN, STAGE_KINDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

TINY = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def record(name: str, tokens: list[int]) -> dict[str, object]:
    return {
        "id": name,
        "group": "g",
        "tokens": tokens,
        "loss_mask": [0] * 3 + [1] * (len(tokens) - 3),
        "advantage": 1.0 if name == "a" else -0.5,
        "old_logprobs": [-8.0] * len(tokens),
    }


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Of transformers, as it comes out of a folder."""
    family = family_named("qwen3_5")
    torch.manual_seed(0)
    family.model_class(family.config_class(**TINY)).save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_trainer_loop_trains_a_model_of_transformers(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert not model.training
    (loop,) = blocks("python")
    steps = [[record("a", [1, 2, 3, 4, 5]), record("b", [1, 2, 3, 4, 6, 7]), record("c", [1, 9, 8, 7])]] * 2
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    exec(loop, {"steps": steps, "model": model})
    assert model.training
    for name, each in model.named_parameters():
        assert torch.isfinite(each).all(), name
        assert not torch.equal(each, before[name]), name


def test_every_registered_stage_is_in_the_table():
    for kind in STAGE_KINDS:
        row = next(line for line in README.splitlines() if line.startswith(f"| {kind} |"))
        for name in BUILT_IN[kind]:
            assert f"`{name}`" in row, f"{kind}: {name}"


def test_files_that_are_named_exist():
    for name in re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"bash (tools/\S+)", README):
        assert (ROOT / name).exists(), name
