"""The trainer's loop of the README trains as trajectory-wise training of the unmodified model does."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import harts
from harts.backends.model.huggingface.family import family_named
from tests.backends.model.huggingface.models import stock, tiny
from tests.backends.model.huggingface.runs import errors, far, gradients, trajectory_wise

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


def records(trained: bool = True) -> list[dict[str, Any]]:
    """A step of trajectories that share prefixes; ratios fall on both sides of the clip, trained tokens have gaps."""
    draw = np.random.default_rng(5)
    paths = [[1, 2, 3, 4, 5, 8, 9, 2], [1, 2, 3, 4, 6, 7, 7, 3, 5], [1, 9, 8, 7, 6], [1, 2, 3, 4, 6, 7, 1]]
    return [
        {
            "id": str(i),
            "group": "g",
            "tokens": path,
            "loss_mask": (draw.random(len(path)) < 0.6).tolist() if trained else [0] * len(path),
            "advantage": float(advantage),
            "old_logprobs": (draw.normal(-np.log(TINY["vocab_size"]), 0.5, len(path))).tolist(),
        }
        for i, (path, advantage) in enumerate(zip(paths, [1.0, -0.5, 0.75, -1.25], strict=True))
    ]


def grpo(model: Any, step: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """The loss of a step, every trajectory by itself, and the ratios."""
    terms, ratios = [], []
    for each in step:
        ids, mask = torch.tensor(each["tokens"]), torch.tensor(each["loss_mask"][1:], dtype=torch.bool)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratio = (logprobs - torch.tensor(each["old_logprobs"][1:])).exp()[mask]
        terms.append(-torch.minimum(ratio * each["advantage"], ratio.clamp(0.8, 1.2) * each["advantage"]))
        ratios.append(ratio.detach())
    return torch.cat(terms).mean(), torch.cat(ratios)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of transformers, as it comes out of a folder; its plain calls run in torch, also where FLA is installed."""
    monkeypatch.chdir(ROOT)
    family = family_named("qwen3_5")
    for name in (family.delta_rule, family.conv):
        monkeypatch.setattr(family.modeling, name, inspect.unwrap(getattr(family.modeling, name)))
    torch.manual_seed(0)
    family.model_class(family.config_class(**TINY)).save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path)


def run_loop(model: Any, steps: list[list[dict[str, Any]]]) -> dict[str, Any]:
    names: dict[str, Any] = {"steps": steps, "model": model}
    exec(blocks("python")[0], names)
    return names


def test_the_trainer_loop_has_the_gradients_of_trajectory_wise_grpo(model: Any) -> None:
    twin = copy.deepcopy(model)
    assert not model.training
    run_loop(model, [records()])
    assert model.training
    loss, ratios = grpo(twin, records())
    bands = torch.bucketize(ratios, torch.tensor([0.8, 1.2]))
    assert bands.bincount(minlength=3).min() > 2  # below, within and above the clip
    loss.backward()
    assert not far(errors(gradients(model), gradients(twin), 1e-2), 1e-5)
    before = dict(twin.named_parameters())
    for name, each in model.named_parameters():
        assert torch.isfinite(each).all(), name
        assert not torch.equal(each, before[name]), name


def test_a_step_without_trained_tokens_moves_no_weights(model: Any) -> None:
    twin = copy.deepcopy(model)
    run_loop(model, [records()])
    run_loop(twin, [records(), records(trained=False)])
    weights = dict(twin.named_parameters())
    assert all(torch.equal(each, weights[name]) for name, each in model.named_parameters())


def test_router_losses_are_those_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = tiny("kimi_linear")
    batch = harts.rollout_batch(records(), "test")
    names: dict[str, Any] = {}
    exec(blocks("python")[1], names)
    wanted = trajectory_wise(stock(made), [each["tokens"] for each in records()], "kimi_linear")
    tokens = sum(len(each["tokens"]) for each in records())

    def found(z: float, balance: float, capacity: int) -> tuple[int, float]:
        pipeline = harts.load(
            "pipelines/trainer_huggingface.yaml", [f"partition.capacity={capacity}"], module=made.module
        )
        layouts = pipeline.plan(batch)
        parts = [
            names["router_loss"](pipeline.logprobs(layout).outputs, layouts.step, z, balance)
            for layout in layouts.items
        ]
        return len(parts), float(sum(parts))

    assert wanted.z is not None and wanted.balance is not None
    z, balance = float(wanted.z.detach()) / tokens, float(wanted.balance.detach())
    assert found(1e-3, 0.5, 1000) == (1, pytest.approx(1e-3 * z + 0.5 * balance, rel=1e-5))
    count, alone = found(1.0, 0.0, 14)
    assert count > 1
    assert alone == pytest.approx(z, rel=1e-5)
    assert found(0.0, 1.0, 14)[1] < 1.5 * balance  # parts of a mean, not a sum
