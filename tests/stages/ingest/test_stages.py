"""The two ingest stages and their options."""

import tracemalloc

import numpy as np
import pytest
from pydantic import ValidationError

from harts.errors import InputError, VerifyError
from harts.ir import CompactTrie, RolloutBatch
from harts.stages.ingest.handed_over import HandedOver
from harts.stages.ingest.jsonl import Jsonl, read_jsonl
from harts.stages.ingest.records import rollout_batch
from tests.forests import batch_of
from tests.stages.ingest.files import HEADER, front, record, write

NAN = float("nan")


def from_file(path, **config) -> CompactTrie:
    return Jsonl(Jsonl.Config(path=path, **config)).run(None)


def from_batch(batch, **config) -> CompactTrie:
    return HandedOver(HandedOver.Config(**config)).run(batch)


def test_edges():
    assert Jsonl.edge == (type(None), CompactTrie)
    assert HandedOver.edge == (RolloutBatch, CompactTrie)


def test_unknown_option_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="capacity"):
        Jsonl.Config(path=tmp_path, capacity=3)


def test_both_stages_give_the_same_trie(tmp_path):
    records = [record("a", reward=1.0), record("b", [1, 2, 4], reward=0.0)]
    path = write(tmp_path / "two.jsonl", records)
    options = {"shared_trained_token": "once", "group_advantage": "centered"}
    one, two = from_file(path, **options), from_batch(rollout_batch(records, str(path)), **options)
    assert one.digest() == two.digest()
    assert one.shared_trained_token == "once" and one.loss_mask.tolist() == [False, True, True, False, False, True]
    assert one.batch.columns.advantage.tolist() == [0.5, -0.5]


def test_limit_reads_the_first_trajectories_only(tmp_path):
    path = write(tmp_path / "many.jsonl", [record("a"), record("b"), {"id": "broken"}])
    assert from_file(path, limit=2).batch.columns.names == ("a", "b")
    coded = write(tmp_path / "front.jsonl", [HEADER, front("a", 0, [1], []), front("b", 1, [2], []), {}])
    assert from_file(coded, limit=2).batch.columns.names == ("a", "b")


def test_max_length_is_of_a_trajectory_not_of_the_tree(tmp_path):
    trunk = list(range(1000))
    paths = [record(f"t{i}", [*trunk, *range(5000 + 10 * i, 5010 + 10 * i)]) for i in range(100)]
    trie = from_file(write(tmp_path / "wide.jsonl", paths), max_length=1010)
    assert trie.compact_tokens == 2000
    with pytest.raises(
        InputError, match=r"wide.*trajectory 't0': field tokens: has 1010 entries, max_length is 1009 \(100"
    ):
        from_batch(trie.batch, max_length=1009)


def test_shipped_tokens_take_a_few_bytes_each_not_an_object(tmp_path):
    tokens = list(range(1000, 41_000))
    path = write(tmp_path / "large.jsonl", [record(f"t{i}", [i, *tokens]) for i in range(12)])
    total = 12 * 40_001
    tracemalloc.start()
    batch = read_jsonl(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batch.tokens) == total
    assert kept < 6 * total
    assert peak < 6 * total + 120 * 40_001  # one record's text, Python numbers and arrays at a time


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"old_logprobs": np.array([0, 0, -np.inf, 0, 0])}, "'t0': field old_logprobs: entry 2 is -inf"),
        ({"advantages": np.array([NAN, 0, 0, NAN, NAN])}, "'t1': field advantages: entry 1 is nan"),
        ({"advantage": np.array([0.0, NAN])}, "'t1': field advantage: is nan"),
        ({"reward": np.array([np.inf, 0.0])}, "'t0': field reward: is inf"),
        ({"temperature": np.array([1.0, -2.0])}, "'t1': field temperature: is -2.0"),
        ({"temperatures": np.array([0.0, 1, 1, 0, 0])}, "'t1': field temperatures: entry 1 is 0.0"),
    ],
)
def test_handed_over_values_keep_the_same_rules(fields, words):
    with pytest.raises(InputError, match=f"^test: trajectory {words}"):
        from_batch(batch_of([[1, 2, 3], [1, 2]], **fields))


def test_handed_over_reward_may_be_unknown():
    trie = from_batch(batch_of([[1, 2, 3], [1, 2]], reward=np.array([NAN, 1.0])))
    assert np.isnan(trie.batch.columns.reward[0])


def test_handed_over_batch_must_be_sound():
    with pytest.raises(VerifyError, match=r"rollout_batch\.tokens\[1\]"):
        from_batch(batch_of([[1, -2, 3]]))
    with pytest.raises(VerifyError, match="names must be unique"):
        from_batch(batch_of([[1], [2]], names=("a", "a")))
    with pytest.raises(VerifyError, match=r"columns\.offset\[0\]: a trajectory must have at least one token"):
        from_batch(batch_of([[], [1]]))
    with pytest.raises(InputError, match="test: holds 0 trajectories"):
        from_batch(batch_of([], groups=()))


def test_torch_tensors_are_taken_as_arrays():
    torch = pytest.importorskip("torch")
    lists = record("a", advantages=[0.5, 1.0, -1.0])
    tensors = lists | {field: torch.tensor(lists[field]) for field in ("tokens", "loss_mask", "advantages")}
    assert rollout_batch([tensors], "test").digest() == rollout_batch([lists], "test").digest()
