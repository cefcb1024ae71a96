"""What the README shows works as shown."""

import re
from pathlib import Path

import pytest
import torch

from harts.registry import BUILT_IN, STAGE_KINDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


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


def test_the_trainer_loop_trains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    (loop,) = blocks("python")
    steps = [[record("a", [1, 2, 3, 4, 5]), record("b", [1, 2, 3, 4, 6, 7]), record("c", [1, 9, 8, 7])]] * 2
    scope: dict[str, object] = {"steps": steps}
    exec(loop, scope)
    model = scope["model"].module  # type: ignore[attr-defined]
    assert model.head.weight.grad.abs().max() > 0
    assert torch.isfinite(model.head.weight).all()


def test_every_registered_stage_is_in_the_table():
    for kind in STAGE_KINDS:
        row = next(line for line in README.splitlines() if line.startswith(f"| {kind} |"))
        for name in BUILT_IN[kind]:
            assert f"`{name}`" in row, f"{kind}: {name}"


def test_files_that_are_named_exist():
    for name in re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"bash (tools/\S+)", README):
        assert (ROOT / name).exists(), name
