"""The same loss and gradient for every split into microbatches and replicas (denominators over the whole step)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harts.ir import CompactTrie
from harts.stages.ingest.trie import build_trie
from harts.train.config import TrainConfig
from harts.train.objectives import Grpo, Objective, Ppo, Sft
from tests.forests import batch_of
from tests.train.rig import layouts_of, step_of

PREFIX = [1, 2, 3, 4, 5]
SPLITS: list[tuple[list[list[int]], int]] = [
    ([[0, 1, 2, 3, 4, 5, 6]], 1),
    ([[0, 1, 4], [2, 3, 5, 6]], 1),
    ([[2, 3, 5, 6], [0, 1, 4]], 2),
    ([[0], [6, 1], [2, 5], [3, 4]], 1),
    ([[5, 2], [3, 4], [6, 1], [0]], 2),
]
"""Trajectories of each microbatch, and replicas."""


def trie(shared: str = "sum") -> CompactTrie:
    """A trained prefix of four trajectories, 10 and 1,000 action tokens, and two that train nothing."""
    rng = np.random.default_rng(0)
    branches = [PREFIX + rng.integers(0, 20, n).tolist() for n in (10, 1000, 10, 7)]
    trajectories = [*branches, [9, 9, 3], [21], [1, 2, 7]]
    batch = batch_of(trajectories)
    mask = batch.columns.loss_mask.copy()
    offset = batch.columns.offset
    mask[offset[4] :] = False
    mask[offset[6] + 2] = True
    mask[offset[3] + 6] = False
    total = int(offset[-1])
    columns: dict[str, Any] = {
        "loss_mask": mask,
        "advantage": rng.normal(size=7),
        "old_logprobs": -3 + 0.3 * rng.normal(size=total),
        "ref_logprobs": -3 + 0.3 * rng.normal(size=total),
        "weights": rng.uniform(0.5, 2, size=total),
    }
    return build_trie(batch_of(trajectories, **columns), shared)


def objectives() -> list[Objective]:
    made: list[Objective] = []
    for reduction in (
        {"reduction": "token_mean"},
        {"reduction": "sequence_mean"},
        {"reduction": "constant", "denominator": 50.0},
    ):
        made.append(Sft(Sft.Config(**reduction)))  # type: ignore[arg-type]
        made.append(Grpo(Grpo.Config(kl_coefficient=0.1, entropy_coefficient=0.01, **reduction)))  # type: ignore[arg-type]
        made.append(Ppo(Ppo.Config(kl_coefficient=0.1, **reduction)))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("objective", objectives(), ids=lambda o: f"{type(o).__name__}-{o.config.reduction}")
def test_loss_and_gradient_do_not_depend_on_the_split(objective: Objective) -> None:
    whole, gradients = step_of(trie(), SPLITS[0][0], objective, flat=True, entropy=True)
    assert whole.loss != 0
    for split, replicas in SPLITS:
        result, found = step_of(trie(), split, objective, replicas=replicas, entropy=True)
        assert result.loss == pytest.approx(whole.loss, rel=1e-12)
        np.testing.assert_allclose(result.logprobs, whole.logprobs, rtol=1e-12)
        for name, want in gradients.items():
            torch.testing.assert_close(found[name], want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("shared", ["sum", "once"])
def test_a_shared_trained_token_counts_as_often_as_the_trie_says(shared: str) -> None:
    made = trie(shared)
    step = layouts_of(made, SPLITS[0][0]).step
    branches = 10 + 1000 + 10 + 7 - 1 + 1
    prefix = 4
    assert step.trained_tokens == branches + (4 * prefix if shared == "sum" else prefix)
    whole, gradients = step_of(made, SPLITS[0][0], Sft(Sft.Config()))
    logprobs = whole.logprobs
    mask = made.loss_mask[np.setdiff1d(np.arange(made.semantic_tokens), made.batch.columns.offset[:-1])]
    weights = made.batch.columns.weights
    assert weights is not None
    weights = weights[np.setdiff1d(np.arange(made.semantic_tokens), made.batch.columns.offset[:-1])]
    assert whole.loss == pytest.approx(-(logprobs * weights)[mask].sum() / step.trained_tokens, rel=1e-12)
    split, other = step_of(made, SPLITS[3][0], Sft(Sft.Config()))
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    for name, want in gradients.items():
        torch.testing.assert_close(other[name], want, rtol=1e-11, atol=1e-14)


def test_router_z_loss_does_not_depend_on_the_split() -> None:
    config = TrainConfig(learning_rate=0.1, optimizer="sgd", router_z_coefficient=0.5)
    whole, gradients = step_of(trie(), SPLITS[0][0], Sft(Sft.Config()), config, moe=True, flat=True)
    assert whole.router_z is not None and whole.expert_load is not None
    assert whole.loss == whole.policy_loss + 0.5 * whole.router_z
    for split, replicas in SPLITS:
        result, found = step_of(trie(), split, Sft(Sft.Config()), config, moe=True, replicas=replicas)
        assert result.loss == pytest.approx(whole.loss, rel=1e-12)
        assert result.expert_load is not None
        assert torch.equal(result.expert_load, whole.expert_load)
        for name, want in gradients.items():
            torch.testing.assert_close(found[name], want, rtol=1e-11, atol=1e-14)
