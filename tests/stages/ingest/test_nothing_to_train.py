"""Trajectories without a trained token are normal input; a step or a trajectory without tokens is not."""

import pytest

from harts.errors import InputError
from harts.stages.ingest.jsonl import read_jsonl
from harts.stages.ingest.records import rollout_batch
from harts.stages.ingest.trie import build_trie
from tests.stages.ingest.files import HEADER, record, write


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"tokens": [4], "loss_mask": [0]},
        {"tokens": [4], "loss_mask": [1]},
    ],
    ids=["prompt only", "one token", "one token, marked"],
)
def test_untrained_trajectory_is_kept_beside_a_trained_one_and_alone(fields):
    for records in ([record("a", **fields), record("b")], [record("a", **fields)]):
        trie = build_trie(rollout_batch(records, "test"))
        trie.verify()
        assert trie.batch.columns.names[0] == "a"
        assert trie.batch.columns.loss_mask[: len(fields["tokens"])].tolist() == list(map(bool, fields["loss_mask"]))


def test_empty_step_is_refused():
    with pytest.raises(InputError, match=r"^trainer: holds 0 trajectories"):
        rollout_batch([], "trainer")


@pytest.mark.parametrize("records", [[], [HEADER]], ids=["no line", "header only"])
def test_empty_file_is_refused(tmp_path, records):
    path = write(tmp_path / "empty.jsonl", records)
    with pytest.raises(InputError, match=r"empty\.jsonl: holds 0 trajectories"):
        read_jsonl(path)


@pytest.mark.parametrize("blank", [b"", b"\n", b"\r\n \n\t"], ids=["nothing", "LF", "blank lines"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
def test_blank_file_is_refused(tmp_path, start, blank):
    path = tmp_path / "blank.jsonl"
    path.write_bytes(start + blank)
    with pytest.raises(InputError, match=r"blank\.jsonl: holds 0 trajectories"):
        read_jsonl(path)


def test_line_that_is_no_object_is_refused_with_its_number(tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_bytes(b"\n[]\n")
    with pytest.raises(InputError, match=r"list\.jsonl:2: is \[\], a record must be an object"):
        read_jsonl(path)


def test_trajectory_without_tokens_is_refused_with_its_index():
    with pytest.raises(InputError, match=r"test\[1\]: trajectory 'b': field tokens: has 0 entries"):
        rollout_batch([record("a"), record("b", tokens=[], loss_mask=[])], "test")
