"""Compact against flat: parity is judged before a time ratio is given, and faults are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harts.errors import BackendError
from harts.train.compare import Comparison, Trainer, compare
from harts.train.config import TrainConfig
from harts.train.differences import Differences
from harts.train.objectives import Grpo
from tests.forests import trie_of
from tests.train.rig import FakeExecute, layouts_of, restore_of

TRAJECTORIES = [[1, 2, 3, 4, 6, 6], [1, 2, 3, 5, 9], [1, 2, 3, 4, 6, 7], [9, 8], [3]]
SPLIT = [[0, 1, 4], [2, 3]]


def trainer(dtype: torch.dtype = torch.float64, fault: str = "", **config: Any) -> Trainer:
    execute = FakeExecute(dtype, moe=True, fault=fault)
    settings: dict[str, Any] = {"steps": 2, "learning_rate": 0.1, "optimizer": "sgd", "router_z_coefficient": 0.1}
    objective = Grpo(Grpo.Config(old_logprobs="current"))
    return Trainer(execute, restore_of(execute, entropy=True), objective, TrainConfig(**settings | config))


def compared(made: Trainer, **how: Any) -> Comparison:
    trie = trie_of(TRAJECTORIES, advantage=np.array([1.0, -0.5, 0.3, 0.7, 0.1]))
    return compare(made, layouts_of(trie, SPLIT), layouts_of(trie, SPLIT, flat=True), **how)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compact_and_flat_agree_over_two_steps(dtype: torch.dtype, optimizer: str) -> None:
    comparison = compared(trainer(dtype, optimizer=optimizer))
    assert comparison.passed, comparison.faults
    assert len(comparison.steps) == len(comparison.compact) == len(comparison.flat) == 2
    assert all(step.equal_load and step.entropy is not None and step.router is not None for step in comparison.steps)
    assert comparison.compression == 20 / 17
    seconds = comparison.seconds
    assert comparison.time_ratio == seconds[1] / seconds[0]
    assert comparison.compact[1].loss != comparison.compact[0].loss


@pytest.mark.parametrize(
    ("fault", "words"),
    [("hidden", "the gradient of"), ("hidden", "log-probs"), ("multiplicity", "expert loads differ")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fault_is_found_and_there_is_no_time_ratio(dtype: torch.dtype, fault: str, words: str) -> None:
    comparison = compared(trainer(dtype, fault))
    assert not comparison.passed
    assert comparison.time_ratio is None
    assert any(words in each for each in comparison.faults)
    assert comparison.faults[0].startswith("step 1: ")


def test_the_compact_weights_are_left_in_the_model() -> None:
    made, alone = trainer(), trainer()
    compared(made)
    trie = trie_of(TRAJECTORIES, advantage=np.array([1.0, -0.5, 0.3, 0.7, 0.1]))
    assert len(list(alone.steps(layouts_of(trie, SPLIT)))) == 2
    ours, theirs = (each.execute.env.model.module.state_dict() for each in (made, alone))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["bias"].any()


def test_progress_names_run_step_and_microbatch() -> None:
    told: list[tuple[str, int, int]] = []
    compared(trainer(), on_microbatch=lambda *where: told.append(where))
    assert told == [(run, step, index) for run in ("compact", "flat") for step in (0, 1) for index in (0, 1)]


def test_a_dtype_without_a_bound_is_refused_before_any_work() -> None:
    made = trainer()
    made.execute.env = SimpleNamespace(model=None, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"no parity bound is set for torch\.bfloat16; known: torch\.float64"):
        compared(made)


def differences(**changed: Any) -> Differences:
    fields: dict[str, Any] = {
        "logprobs": 0.0,
        "logprobs_relative": 0.0,
        "entropy": None,
        "loss": 0.0,
        "router": None,
        "gradients": {"a": 0.0, "b": 0.0},
        "moved": None,
    }
    return Differences(**fields | changed)


@pytest.mark.parametrize(
    "changed",
    [{"logprobs": 2.0}, {"entropy": 2.0}, {"loss": 2.0}, {"router": 2.0}, {"gradients": {"a": 0.0, "b": 2.0}}],
)
def test_every_measure_is_judged(changed: dict[str, Any]) -> None:
    assert differences().faults(1.0) == []
    (fault,) = differences(**changed).faults(1.0)
    assert fault.endswith("2.00e+00, allowed is 1e+00")


def test_not_a_number_never_passes() -> None:
    nan = float("nan")
    assert differences(logprobs=nan).faults(1.0)
    assert differences(gradients={"a": 0.5, "b": nan, "c": 0.7}).worst_gradient[0] == "b"
    assert "gradient of b" in differences(gradients={"a": 0.5, "b": nan}).faults(1.0)[0]


def test_moved_assignments_are_counted() -> None:
    assert differences(moved=(0, 60)).faults(1.0) == []
    assert differences(moved=(0, 60)).equal_load
    assert differences(moved=(2, 60)).faults(1.0)[0].startswith("expert loads differ: 2 of 60 assignments moved")
    made = compared(trainer(fault="multiplicity")).steps[0].moved
    assert made == (2, 20), "three rows count twice in flat training; half of the excess is what moved"
