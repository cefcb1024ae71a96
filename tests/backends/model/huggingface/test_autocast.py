"""A model with float32 weights under autocast on a CPU: as far from float32 as transformers' own run is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import harts
from tests.backends.model.huggingface.models import stock, tiny
from tests.backends.model.huggingface.runs import forest, gradients

TRAINER = Path(__file__).resolve().parents[4] / "pipelines" / "trainer_huggingface.yaml"


def _autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("family", ["olmo_hybrid", "qwen3_5"])
def test_log_probs_and_gradients_are_as_exact_as_those_of_transformers(family: str) -> None:
    model = tiny(family, {"initializer_range": 0.1})
    theirs, paths = stock(model), forest(0)
    records = [
        {"id": str(i), "group": "g", "tokens": path, "loss_mask": [1] * len(path)} for i, path in enumerate(paths)
    ]
    pipeline = harts.load(TRAINER, module=model.module)
    (layout,) = pipeline.plan(harts.rollout_batch(records, "test")).items

    def compact() -> Tensor:
        logprobs: Tensor = pipeline.logprobs(layout).logprobs
        return logprobs

    def trajectory_wise() -> Tensor:
        ids = [torch.tensor(paths[key]) for key in layout.plan.tree.key]
        logits = [theirs(input_ids=each[None], use_cache=False).logits[0, :-1].float() for each in ids]
        return torch.cat([x.log_softmax(-1).gather(1, y[1:, None])[:, 0] for x, y in zip(logits, ids, strict=True)])

    found = []
    for run, module, enabled in (
        (trajectory_wise, theirs, False),
        (trajectory_wise, theirs, True),
        (compact, model.module, True),
    ):
        module.zero_grad()
        with _autocast(enabled):
            logprobs = run()
            assert logprobs.dtype == torch.float32
            logprobs.sum().backward()
        grads = gradients(module)
        found.append((logprobs.detach(), torch.cat([grads[name].flatten() for name in sorted(grads)])))
    for exact, rough, ours in zip(*found, strict=True):
        assert 0 < float((ours - exact).norm()) < 2 * float((rough - exact).norm())
