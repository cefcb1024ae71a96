"""A model with float32 weights under autocast on a CPU: as far from float32 as transformers' own run is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import harts
from tests.backends.model.huggingface.models import CHUNK, EXPERTS, WITH_EXPERTS, routers, stock, tiny
from tests.backends.model.huggingface.runs import compact, forest, gradients, tensors
from tests.parity.trees import layout_of

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


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_loads_are_the_choices_of_the_routers_counted(family: str) -> None:
    model, paths = tiny(family), [[1, 2, 3, 4, 5, 6, first, 7, 8] for first in range(24) for _ in range(25)]
    layout, chosen = layout_of(paths, CHUNK), []
    for router in routers(model.module, family):
        router.register_forward_hook(lambda _module, _given, output: chosen.append(output[-1]))
    plan = tensors(layout)
    with _autocast(True), torch.no_grad():
        found = compact(model, layout, plan)
    assert found.load is not None and found.load.dtype == torch.float32
    q = plan.multiplicity.long()
    wanted = [[int(q[(each == expert).any(1)].sum()) for expert in range(EXPERTS)] for each in chosen]
    assert max(map(max, wanted)) > 256  # past what bfloat16 counts
    assert found.load.tolist() == wanted
