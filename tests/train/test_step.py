"""One step: the caller's order, router losses, nothing to train, and losses that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harts.backends.split import Split
from harts.errors import ConfigError, HartsError
from harts.train.config import TrainConfig
from harts.train.objectives import Grpo, Sft
from harts.train.step import apply_step, run_step
from harts.train.totals import Totals
from tests.forests import trie_of
from tests.train.rig import CONFIG, FakeExecute, layouts_of, restore_of, step_of

TRAJECTORIES = [[1, 2, 3, 4], [9, 8], [1, 2, 3, 5], [7], [1, 2]]
SFT = Sft(Sft.Config())


def unmasked(*trained: int) -> Any:
    """A mask that trains the later tokens of these trajectories only."""
    parts = [
        np.arange(len(tokens)) > 0 if i in trained else np.zeros(len(tokens)) for i, tokens in enumerate(TRAJECTORIES)
    ]
    return np.concatenate(parts).astype(np.bool_)


def test_log_probs_come_in_the_callers_order() -> None:
    whole, _ = step_of(trie_of(TRAJECTORIES), [[0, 1, 2, 3, 4]], SFT, entropy=True)
    split, _ = step_of(trie_of(TRAJECTORIES), [[4, 2], [3], [1, 0]], SFT, entropy=True)
    assert split.offset.tolist() == whole.offset.tolist() == [0, 3, 4, 7, 7, 8]
    np.testing.assert_allclose(split.logprobs, whole.logprobs, rtol=1e-13)
    assert split.entropy is not None and whole.entropy is not None
    np.testing.assert_allclose(split.entropy, whole.entropy, rtol=1e-13)
    assert split.logprobs[[4, 7]] == pytest.approx(split.logprobs[0], rel=1e-13), "token 2 after token 1"
    assert len(set(split.logprobs.round(9))) == 5


def test_router_losses_are_added_with_their_coefficients() -> None:
    config = TrainConfig(learning_rate=0.1, optimizer="sgd", router_z_coefficient=0.5, router_balance_coefficient=2.0)
    split = [[0, 2], [1, 3, 4]]
    result, gradients = step_of(trie_of(TRAJECTORIES), split, SFT, config, moe=True)
    assert result.router_z is not None and result.router_balance is not None
    total = result.policy_loss + 0.5 * result.router_z + 2.0 * result.router_balance
    assert result.loss == pytest.approx(total, rel=1e-15)
    execute = FakeExecute(moe=True)
    layouts = layouts_of(trie_of(TRAJECTORIES), split)
    outs = [execute.run(layout) for layout in layouts.items]
    assert all(out.router_z is not None and out.router_balance is not None for out in outs)
    z = sum(out.router_z for out in outs) / 13  # type: ignore[misc]
    balance = outs[0].router_balance * 8 / 13 + outs[1].router_balance * 5 / 13  # type: ignore[operator]
    assert result.router_z == pytest.approx(float(z.detach()), rel=1e-13)
    assert result.router_balance == pytest.approx(float(balance.detach()), rel=1e-13)
    (want,) = torch.autograd.grad(0.5 * z + 2.0 * balance, execute.env.model.module.router)
    torch.testing.assert_close(gradients["router"], want, rtol=1e-12, atol=1e-14)
    assert result.expert_load is not None
    assert result.expert_load.sum() == 13


def test_a_model_without_experts_has_no_router_losses() -> None:
    result, _ = step_of(trie_of(TRAJECTORIES), [[0, 1, 2, 3, 4]], SFT)
    assert result.router_z is None and result.router_balance is None and result.expert_load is None
    assert result.entropy is None
    assert result.loss == result.policy_loss


def test_gradient_norm_is_over_all_parameters() -> None:
    result, gradients = step_of(trie_of(TRAJECTORIES), [[0, 1, 2, 3, 4]], SFT)
    want = torch.cat([each.flatten() for each in gradients.values()]).norm()
    assert result.gradient_norm == pytest.approx(float(want), rel=1e-13)
    assert result.seconds > 0


def test_gradients_of_the_step_before_are_replaced() -> None:
    execute = FakeExecute()
    layouts = layouts_of(trie_of(TRAJECTORIES), [[0, 1], [2, 3, 4]])
    first = run_step(layouts, execute, restore_of(execute), SFT, CONFIG)
    again = run_step(layouts, execute, restore_of(execute), SFT, CONFIG)
    assert first.gradient_norm == again.gradient_norm


def test_progress_is_told_after_each_microbatch() -> None:
    execute, told = FakeExecute(), []
    layouts = layouts_of(trie_of(TRAJECTORIES), [[0, 1], [2, 3, 4]])
    run_step(layouts, execute, restore_of(execute), SFT, CONFIG, on_microbatch=told.append)
    assert told == [0, 1]


@pytest.mark.parametrize("shape", ["prompt only", "all masked", "one token", "in a microbatch of their own"])
def test_what_trains_nothing_changes_no_gradient(shape: str) -> None:
    extra = {"prompt only": [1, 2, 3], "all masked": [6, 6, 6], "one token": [5]}.get(shape, [6, 6])
    mask = np.concatenate((unmasked(0, 1, 2), np.zeros(len(extra), dtype=np.bool_)))
    split = [[0, 1, 2], [3, 4, 5]] if shape == "in a microbatch of their own" else [[0, 1, 2, 3, 4, 5]]
    result, gradients = step_of(trie_of([*TRAJECTORIES, extra], loss_mask=mask), split, SFT)
    alone, want = step_of(trie_of(TRAJECTORIES, loss_mask=unmasked(0, 1, 2)), [[0, 1, 2, 3, 4]], SFT)
    assert result.loss == pytest.approx(alone.loss, rel=1e-14)
    for name, each in want.items():
        torch.testing.assert_close(gradients[name], each, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_trains_nothing_says_so_and_is_not_applied(optimizer: Any) -> None:
    config = TrainConfig(learning_rate=0.1, optimizer=optimizer, router_z_coefficient=1.0)
    execute = FakeExecute(moe=True)
    module = execute.env.model.module
    before = {name: each.clone() for name, each in module.state_dict().items()}
    layouts = layouts_of(trie_of(TRAJECTORIES, loss_mask=unmasked()), [[0, 1], [2, 3, 4]])
    result = run_step(layouts, execute, restore_of(execute), SFT, config)
    assert result.trained_tokens == 0
    assert result.loss == result.policy_loss == result.gradient_norm == 0.0
    assert result.router_z is not None
    assert result.router_z > 0
    apply_step(execute.env, execute.env.model.optimizer(config.optimizer, config.learning_rate), result)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


def test_a_step_that_trains_nothing_has_zero_gradients_not_none() -> None:
    mask = np.zeros(13, dtype=np.bool_)
    result, gradients = step_of(trie_of(TRAJECTORIES, loss_mask=mask), [[0, 1, 2, 4], [3]], SFT)
    assert result.loss == result.gradient_norm == 0.0
    assert set(gradients) == {"embedding", "head"}
    assert not any(each.any() for each in gradients.values())


def test_a_step_moves_weights_and_expert_biases() -> None:
    execute = FakeExecute(moe=True)
    module = execute.env.model.module
    head = module.head.detach().clone()
    layouts = layouts_of(trie_of(TRAJECTORIES), [[0, 1], [2, 3, 4]])
    result = run_step(layouts, execute, restore_of(execute), SFT, CONFIG)
    apply_step(execute.env, execute.env.model.optimizer(CONFIG.optimizer, CONFIG.learning_rate), result)
    assert module.head.grad is not None
    torch.testing.assert_close(module.head.detach(), head - 0.1 * module.head.grad, rtol=1e-14, atol=1e-15)
    assert result.expert_load is not None
    assert torch.equal(module.bias, torch.sign(result.expert_load.mean() - result.expert_load))


def test_a_loss_that_is_not_finite_names_its_microbatch() -> None:
    old = np.full(13, -1e4)
    trie = trie_of(TRAJECTORIES, old_logprobs=old, advantage=np.array([1.0, 1.0, -1.0, 1.0, 1.0]))
    with pytest.raises(HartsError, match="microbatch 1: the loss is "):
        step_of(trie, [[0, 1], [2, 3, 4]], Grpo(Grpo.Config()))


def test_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    execute = FakeExecute()
    execute.env.model.module.head.register_hook(lambda gradient: gradient * float("nan"))
    layouts = layouts_of(trie_of(TRAJECTORIES), [[0, 1, 2, 3, 4]])
    with pytest.raises(HartsError, match="parameter head: its gradient is not finite"):
        run_step(layouts, execute, restore_of(execute), SFT, CONFIG)


def test_a_loss_that_another_process_finds_not_finite_is_an_error_here() -> None:
    layouts = layouts_of(trie_of(TRAJECTORIES), [[0, 1], [2, 3, 4]])
    totals = Totals(layouts, SFT, CONFIG, Split(replica=0, replicas=2))

    def total(values: torch.Tensor) -> torch.Tensor:
        if values.shape == (2,):
            values[1] = torch.inf  # of the microbatch of replica 1
        return values

    with pytest.raises(HartsError, match="microbatch 1: the loss is "):
        totals.gather(total)


def test_a_step_for_other_replicas_than_the_model_has_is_refused() -> None:
    execute = FakeExecute()
    execute.env.model.split = Split(replica=1, replicas=3)
    layouts = layouts_of(trie_of(TRAJECTORIES), [[0, 1], [2, 3, 4]], replicas=2)
    with pytest.raises(ConfigError, match="planned for 2, the model has 3 data-parallel replicas"):
        run_step(layouts, execute, restore_of(execute), SFT, CONFIG)
