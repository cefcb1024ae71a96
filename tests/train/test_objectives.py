"""Objectives by hand on tiny examples, and the data that they refuse."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from harts.errors import ConfigError, InputError
from harts.registry import resolve
from harts.train.objectives import Grpo, LossTerms, Objective, Ppo, Sft
from tests.forests import trie_of
from tests.train.rig import layouts_of

TRAJECTORIES = [[1, 2, 3], [1, 4]]
CURRENT = [-1.0, -2.0, -0.5]
"""Log-probs of tokens 2 and 3 of the first trajectory, and 4 of the second."""


def per_token(values: list[float]) -> Any:
    """Values of the three predictions as a column of the five tokens."""
    return np.array([0.0, values[0], values[1], 0.0, values[2]])


def terms_of(current: list[float] = CURRENT, entropy: list[float] | None = None, **columns: Any) -> LossTerms:
    layouts = layouts_of(trie_of(TRAJECTORIES, **columns), [[0, 1]])
    logprobs = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    spread = None if entropy is None else torch.tensor(entropy, dtype=torch.float64, requires_grad=True)
    return LossTerms(logprobs, spread, layouts.items[0].plan.tree.columns, layouts.step)


def loss_and_gradient(objective: Objective, terms: LossTerms) -> tuple[float, list[float]]:
    loss = objective.loss(terms)
    (gradient,) = torch.autograd.grad(loss, terms.logprobs)
    return float(loss.detach()), gradient.tolist()


def grpo(**config: Any) -> Grpo:
    return Grpo(Grpo.Config(**config))


@pytest.mark.parametrize("name", ["grpo", "ppo", "sft"])
def test_objectives_are_registered(name: str) -> None:
    assert issubclass(resolve("objectives", name), Objective)


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    loss, gradient = loss_and_gradient(Sft(Sft.Config()), terms_of())
    assert loss == pytest.approx(3.5 / 3, rel=1e-15)
    assert gradient == pytest.approx([-1 / 3] * 3, rel=1e-15)


def test_sequence_mean_gives_each_trajectory_the_same_say() -> None:
    loss, gradient = loss_and_gradient(Sft(Sft.Config(reduction="sequence_mean")), terms_of())
    assert loss == pytest.approx((1.5 + 0.5) / 2, rel=1e-15)
    assert gradient == pytest.approx([-0.25, -0.25, -0.5], rel=1e-15)


def test_constant_divides_the_sum() -> None:
    loss, _ = loss_and_gradient(Sft(Sft.Config(reduction="constant", denominator=7.0)), terms_of())
    assert loss == pytest.approx(0.5, rel=1e-15)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_only_constant_takes_a_denominator_and_needs_it(reduction: str) -> None:
    with pytest.raises(ValidationError, match="takes no denominator"):
        Sft.Config(reduction=reduction, denominator=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="needs a denominator"):
        Sft.Config(reduction="constant")


def test_weights_multiply_the_terms_and_not_the_denominator() -> None:
    loss, gradient = loss_and_gradient(Sft(Sft.Config()), terms_of(weights=per_token([2.0, 0.0, 1.0])))
    assert loss == pytest.approx(2.5 / 3, rel=1e-15)
    assert gradient == pytest.approx([-2 / 3, 0, -1 / 3], rel=1e-15)


def test_grpo_on_policy_has_ratio_one() -> None:
    advantages = per_token([2.0, -1.0, 0.5])
    loss, gradient = loss_and_gradient(grpo(old_logprobs="current"), terms_of(advantages=advantages))
    assert loss == pytest.approx(-0.5, rel=1e-15)
    assert gradient == pytest.approx([-2 / 3, 1 / 3, -0.5 / 3], rel=1e-15)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # clipped at 1 + 0.3
        (0.5, 2.0, -1.0, -1.0),  # a small ratio of a good token is not clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped at 1 - 0.2
        (1.5, -2.0, 3.0, 3.0),  # a large ratio of a bad token is not clipped
        (3.0, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_ratio_is_clipped_on_the_side_of_the_advantage(
    name: str, ratio: float, advantage: float, term: float, slope: float
) -> None:
    objective = grpo(clip_low=0.2, clip_high=0.3) if name == "grpo" else Ppo(Ppo.Config(clip=0.2, clip_high=0.3))
    old = per_token([-1.0 - math.log(ratio), -2.0, -0.5])
    terms = terms_of(advantages=per_token([advantage, 0.0, 0.0]), old_logprobs=old)
    loss, gradient = loss_and_gradient(objective, terms)
    assert loss * 3 == pytest.approx(term, rel=1e-13)
    assert gradient[0] * 3 == pytest.approx(slope, rel=1e-13)


def test_ppo_clips_are_symmetric_by_default() -> None:
    old = per_token([-1.0 - math.log(1.5), -2.0 - math.log(0.5), -0.5])
    terms = terms_of(advantages=per_token([1.0, -1.0, 0.0]), old_logprobs=old)
    assert loss_and_gradient(Ppo(Ppo.Config(clip=0.25)), terms)[0] * 3 == pytest.approx(-1.25 + 0.75, rel=1e-13)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_kl_to_the_reference_is_k3(name: str) -> None:
    cls = resolve("objectives", name)
    terms = terms_of(
        advantages=per_token([0.0] * 3), old_logprobs=per_token(CURRENT), ref_logprobs=per_token([-0.5, -2.0, -1.0])
    )
    loss, gradient = loss_and_gradient(cls(cls.Config(kl_coefficient=0.1)), terms)
    want = (math.exp(0.5) - 0.5 - 1) + (math.exp(-0.5) + 0.5 - 1)
    assert loss == pytest.approx(0.1 * want / 3, rel=1e-13)
    assert gradient == pytest.approx([0.1 * (1 - math.exp(0.5)) / 3, 0.0, 0.1 * (1 - math.exp(-0.5)) / 3], rel=1e-13)


def test_entropy_is_a_bonus() -> None:
    terms = terms_of(entropy=[1.0, 2.0, 4.0], advantage=np.zeros(2))
    loss = grpo(old_logprobs="current", entropy_coefficient=0.3).loss(terms)
    assert float(loss.detach()) == pytest.approx(-0.3 * 7 / 3, rel=1e-15)
    assert terms.entropy is not None
    assert torch.autograd.grad(loss, terms.entropy)[0].tolist() == pytest.approx([-0.1] * 3)


def test_entropy_bonus_needs_the_entropy() -> None:
    with pytest.raises(ConfigError, match=r"needs restore\.entropy: true"):
        grpo(old_logprobs="current", entropy_coefficient=0.3).loss(terms_of(advantage=np.zeros(2)))


@pytest.mark.parametrize(
    ("objective", "field", "columns"),
    [
        (grpo(), "old_logprobs", {"advantage": np.zeros(2)}),
        (Ppo(Ppo.Config()), "old_logprobs", {"advantage": np.zeros(2)}),
        (grpo(old_logprobs="current"), "advantage", {}),
        (grpo(old_logprobs="current", kl_coefficient=1.0), "ref_logprobs", {"advantage": np.zeros(2)}),
    ],
)
def test_a_missing_column_is_named(objective: Objective, field: str, columns: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"field {field}: "):
        objective.loss(terms_of(**columns))


@pytest.mark.parametrize("bad", [float("nan"), -math.inf])
def test_a_trained_token_must_have_finite_columns(bad: float) -> None:
    terms = terms_of(advantage=np.zeros(2), old_logprobs=per_token([-1.0, bad, -1.0]))
    with pytest.raises(InputError, match=r"trajectory 't0', token 2: old_logprobs is (nan|-inf) on a trained token"):
        grpo().loss(terms)


@pytest.mark.parametrize("garbage", [-200.0, -1e10, -math.inf, math.nan, math.inf])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_what_masked_positions_hold_has_no_effect(name: str, garbage: float) -> None:
    cls = resolve("objectives", name)
    objective = cls(cls.Config(kl_coefficient=0.1))
    mask = np.array([False, False, True, False, True])

    def run(masked: float) -> tuple[float, list[float]]:
        column = per_token([masked, -1.9, -0.6])
        column[[0, 3]] = masked
        ones = np.where(mask, 1.0, masked)
        terms = terms_of(loss_mask=mask, old_logprobs=column, ref_logprobs=column, advantages=ones, weights=ones)
        return loss_and_gradient(objective, terms)

    assert run(garbage) == run(-1.0)
    assert run(garbage)[1][0] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_overflows_stays_finite_where_it_is_clipped(dtype: torch.dtype) -> None:
    terms = terms_of(advantages=per_token([1.0, 0.0, 1.0]), old_logprobs=per_token([-101.0, -102.0, -0.5]))
    logprobs = terms.logprobs.detach().to(dtype).requires_grad_()
    loss, gradient = loss_and_gradient(grpo(), LossTerms(logprobs, None, terms.columns, terms.step))
    assert loss == pytest.approx(-(1.2 + 1.0) / 3, rel=1e-6)
    assert gradient == pytest.approx([0.0, 0.0, -1 / 3], rel=1e-6)


def test_a_ratio_that_overflows_unclipped_is_not_hidden() -> None:
    terms = terms_of(advantages=per_token([-1.0, 0.0, 1.0]), old_logprobs=per_token([-101.0, -2.0, -0.5]))
    logprobs = terms.logprobs.detach().float()
    assert not torch.isfinite(grpo().loss(LossTerms(logprobs, None, terms.columns, terms.step)))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_nothing_trained_is_exactly_zero(reduction: str) -> None:
    terms = terms_of(
        loss_mask=np.zeros(5, dtype=np.bool_), advantages=np.full(5, np.nan), old_logprobs=np.full(5, -np.inf)
    )
    assert terms.step.trained_tokens == 0
    loss, gradient = loss_and_gradient(grpo(reduction=reduction), terms)
    assert loss == 0.0
    assert gradient == [0.0, 0.0, 0.0]


def test_a_first_token_is_never_trained_even_if_its_mask_says_so() -> None:
    everything = terms_of(loss_mask=np.ones(5, dtype=np.bool_))
    assert everything.step.trained_tokens == 3
    assert loss_and_gradient(Sft(Sft.Config()), everything) == loss_and_gradient(Sft(Sft.Config()), terms_of())


def test_terms_are_in_the_dtype_of_the_log_probs() -> None:
    terms = terms_of(advantage=np.ones(2), old_logprobs=per_token(CURRENT))
    logprobs: Tensor = terms.logprobs.detach().float().requires_grad_()
    assert grpo().loss(LossTerms(logprobs, None, terms.columns, terms.step)).dtype == torch.float32


def test_a_train_section_is_checked_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from harts.registry import resolve\n"
        "from harts.train.config import TrainConfig\n"
        "resolve('objectives', 'grpo').Config(clip_high=0.3)\n"
        "TrainConfig(learning_rate=0.1, optimizer='sgd')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
