"""Per-token and per-trajectory values line up with the tokens and are finite where they are read."""

import re

import numpy as np
import pytest

from harts.errors import InputError
from harts.stages.ingest.records import rollout_batch
from tests.stages.ingest.files import record

NAN, INF = float("nan"), float("inf")
NINE = list(range(9))
MASK = [0, 0, 0, 0, 0, 1, 1, 1, 1]


def nine(**fields):
    return record("a", NINE, loss_mask=MASK) | fields


def faults_of(*records) -> list[str]:
    with pytest.raises(InputError) as caught:
        rollout_batch(records, "test")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"loss_mask": [1] * 7}, "loss_mask", "has 7 entries, expected 9"),
        ({"old_logprobs": [-1.0] * 4}, "old_logprobs", "has 4 entries, expected 9"),
        ({"ref_logprobs": np.zeros(10)}, "ref_logprobs", "has 10 entries, expected 9"),
        ({"advantages": [0.0] * 6 + [NAN, 0.0, INF]}, "advantages", "entry 6 is nan.*2 of 9"),
        ({"old_logprobs": [-1.0] * 8 + [-INF]}, "old_logprobs", "entry 8 is -inf"),
        ({"weights": [1.0] * 5 + [INF] + [1.0] * 3}, "weights", "entry 5 is inf"),
        ({"advantage": NAN}, "advantage", "is nan, must be finite: 4 tokens are trained"),
        ({"reward": INF}, "reward", "is inf, must be finite"),
        ({"reward": NAN}, "reward", "is nan, must be finite"),
        ({"weight": -INF}, "weight", "is -inf, must be finite"),
        ({"loss_mask": [0, 0.5] + [1] * 7}, "loss_mask", "entry 1 is 0.5, must be 0, 1, true or false"),
        ({"loss_mask": [0, 1.0] + [1] * 7}, "loss_mask", "entry 1 is 1.0, must be 0, 1, true or false"),
        ({"loss_mask": np.ones(9)}, "loss_mask", "has dtype float64"),
        ({"loss_mask": [0] * 8 + [2]}, "loss_mask", "entry 8 is 2"),
        ({"loss_mask": [-1] + [0] * 8}, "loss_mask", "entry 0 is -1"),
        ({"temperature": 0.0}, "temperature", "is 0.0, must be positive and finite"),
        ({"temperature": NAN}, "temperature", "is nan, must be positive and finite"),
        ({"temperature": INF}, "temperature", "is inf, must be positive and finite"),
        ({"temperature": True}, "temperature", "is True, must be a number"),
        ({"temperatures": [1.0] * 4 + [-1.0] * 5}, "temperatures", r"entry 4 is -1.0.*\(5 of 9"),
        ({"temperatures": [1.0, 0.0] + [1.0] * 7}, "temperatures", "entry 1 is 0.0"),
        ({"advantage": 1.0, "advantages": [1.0] * 9}, "advantage", "excludes advantages"),
        ({"advantage": [1.0] * 9}, "advantage", r"is \[1.0, .*, must be a number"),
        ({"advantages": 1.0}, "advantages", "is 1.0, must be a list"),
        ({"advantages": "high"}, "advantages", "is 'high', must be a list"),
        ({"advantages": [1.0] * 8 + [None]}, "advantages", "entry 8 is None"),
        ({"advantages": [10**400] + [1.0] * 8}, "advantages", "entry 0 is 10+.*too large for float64"),
        ({"advantages": np.ones((1, 9))}, "advantages", r"an array of shape \(1, 9\)"),
        ({"tokens": [0, -1] + [1] * 7}, "tokens", "entry 1 is -1, a token id must be from 0 to 2147483647"),
        ({"tokens": [0, 2**31] + [1] * 7}, "tokens", "entry 1 is 2147483648"),
        ({"tokens": [0, 2**70] + [1] * 7}, "tokens", "entry 1 is 1180591620717411303424, too large for int64"),
        ({"tokens": [0, True] + [1] * 7}, "tokens", "entry 1 is True, must be a token id"),
        ({"tokens": [0, 1.0] + [1] * 7}, "tokens", "entry 1 is 1.0, must be a token id"),
        ({"tokens": np.ones(9, dtype=np.bool_)}, "tokens", "has dtype bool"),
        ({"tokens": None}, "tokens", "is null"),
        ({"reward_known": 0}, "reward_known", "is 0, must be true or false"),
        ({"group": 3}, "group", "is 3, must be text"),
        ({"group": ""}, "group", "is '', must be text that is not empty"),
    ],
)
def test_fault_names_trajectory_field_and_numbers(fields, field, words):
    (text,) = faults_of(nine(**fields))
    assert re.search(rf"^test\[0\]: trajectory 'a': field {field}: .*{words}", text), text


def test_all_faults_of_a_record_are_told_at_once():
    bad = nine(tokens=[0, -5, *NINE[2:]], weights=[NAN] * 9, old_logprobs=[0.0] * 3, group=None, advantage=2.0)
    fields = [re.search(r"^test\[1\]: trajectory 'a': field (\w+): ", text)[1] for text in faults_of(record("z"), bad)]
    assert fields == ["group", "tokens", "advantage", "old_logprobs", "weights"]


def test_what_stands_at_untrained_positions_is_kept_as_it_is():
    odd = [NAN, INF, -INF, NAN, NAN]
    values = odd + [0.5] * 4
    batch = rollout_batch([nine(advantages=values, old_logprobs=values, ref_logprobs=values, weights=values)], "test")
    for field in ("advantages", "old_logprobs", "ref_logprobs", "weights"):
        np.testing.assert_array_equal(getattr(batch.columns, field), values)


def test_first_token_is_never_read():
    values = [NAN, -1.0, -1.0]
    batch = rollout_batch([record("a", loss_mask=[1, 1, 1], old_logprobs=values, temperatures=[0.0, 1.0, 2.0])], "test")
    np.testing.assert_array_equal(batch.columns.old_logprobs, values)
    assert batch.columns.loss_mask.tolist() == [True, True, True]


def test_values_of_a_trajectory_without_trained_tokens_may_be_anything():
    batch = rollout_batch([record("a", loss_mask=[1, 0, 0], advantage=NAN, weight=INF, reward=NAN)], "test")
    assert np.isnan(batch.columns.advantage[0]) and np.isinf(batch.columns.weight[0])


def test_placeholder_reward_becomes_unknown():
    batch = rollout_batch([record("a", reward=0.0, reward_known=False), record("b", reward=2, reward_known=True)], "t")
    np.testing.assert_array_equal(batch.columns.reward, [NAN, 2.0])


@pytest.mark.parametrize("second", [{}, {"advantages": [0.0] * 3}])
def test_all_trajectories_hold_the_same_optional_columns(second):
    texts = faults_of(record("a", advantage=1.0), record("b", advantage=1.0), record("c", **second))
    assert texts[0].startswith(
        "test[2]: trajectory 'c': field advantage: is missing, the first trajectory 'a' holds it"
    )
    assert len(texts) == 1 + len(second)


def test_null_is_the_same_as_absent():
    batch = rollout_batch([record("a", advantage=None), record("b")], "test")
    assert batch.columns.advantage is None


def test_ids_are_unique():
    (text,) = faults_of(record("a"), record("b"), record("a"))
    assert text == "test[2]: trajectory 'a': field id: is taken by test[0]"


@pytest.mark.parametrize("name", [None, 7, "", "\ud800"])
def test_id_must_be_writable_text(name):
    (text,) = faults_of(record() | {"id": name})
    assert "field id: is " in text
    text.encode()


def test_arrays_give_the_same_batch_as_lists():
    lists = nine(advantages=[0.5] * 9, reward=1.0)
    arrays = lists | {
        "tokens": np.array(NINE, dtype=np.uint16),
        "loss_mask": np.array(MASK, dtype=np.int8),
        "advantages": np.full(9, 0.5, dtype=np.float32),
        "reward": np.float32(1.0),
    }
    assert rollout_batch([lists], "test").digest() == rollout_batch([arrays], "test").digest()
