import numpy as np
import pytest

from harts.errors import InputError
from harts.stages.ingest.advantages import with_group_advantages
from harts.stages.ingest.records import rollout_batch
from tests.stages.ingest.files import record


def batch_of(rewards: dict[str, list[float]], **fields):
    """Groups interleaved, so that no group is a contiguous block."""
    found = [(i, group, reward) for group, each in rewards.items() for i, reward in enumerate(each)]
    found.sort(key=lambda item: item[0])
    return rollout_batch([record(f"{g}{i}", group=g, reward=r, **fields) for i, g, r in found], "test")


def advantages(batch, kind):
    made = with_group_advantages(batch, kind).columns
    return dict(zip(made.names, made.advantage.tolist(), strict=True))


def test_centered_and_normalized_within_each_group():
    batch = batch_of({"a": [1.0, 0.0, 0.0], "b": [5.0, 3.0]})
    third = 1 / 3
    assert advantages(batch, "centered") == pytest.approx({"a0": 2 / 3, "a1": -third, "a2": -third, "b0": 1, "b1": -1})
    spread = np.std([1.0, 0.0, 0.0], ddof=1) + 1e-6
    made = advantages(batch, "normalized")
    assert made["a0"] == pytest.approx(2 / 3 / spread, rel=1e-12)
    assert made["b0"] == pytest.approx(1 / (np.sqrt(2) + 1e-6), rel=1e-12)


@pytest.mark.parametrize("kind", ["centered", "normalized"])
def test_group_of_one_or_of_equal_rewards_gets_exactly_zero(kind):
    batch = batch_of({"one": [7.0], "equal": [0.1] * 3, "eight": [0.0] * 7 + [1.0]})
    made = advantages(batch, kind)
    assert made["one0"] == 0.0 and all(made[f"equal{i}"] == 0.0 for i in range(3))
    assert made["eight7"] > 0 and np.isfinite(list(made.values())).all()


@pytest.mark.parametrize("kind", ["centered", "normalized"])
def test_order_of_the_trajectories_does_not_matter(kind):
    rewards = np.random.default_rng(0).normal(size=50)
    forward = [record(f"t{i}", reward=r) for i, r in enumerate(rewards)]
    one = advantages(rollout_batch(forward, "test"), kind)
    assert advantages(rollout_batch(forward[::-1], "test"), kind) == one


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([record("a", reward=1.0, advantage=0.0)], "'a': field advantage: the data holds it"),
        ([record("a", reward=1.0, advantages=[0.0] * 3)], "'a': field advantages: the data holds it"),
        ([record("a")], "'a': field reward: is missing"),
        ([record("a", reward=1.0), record("b", reward=0.0, reward_known=False)], "'b': field reward: is unknown"),
        ([record("a", reward=float("inf"), loss_mask=[0, 0, 0])], "'a': field reward: is inf"),
    ],
)
def test_refusal_names_the_trajectory(records, words):
    with pytest.raises(InputError, match=f"^test: trajectory {words}"):
        with_group_advantages(rollout_batch(records, "test"), "normalized")
