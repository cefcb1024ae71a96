import random
import re

import numpy as np
import pytest

from harts.errors import InputError
from harts.stages.ingest.jsonl import read_jsonl
from harts.stages.ingest.lcp_sort import common_prefix
from tests.forests import random_trajectories
from tests.stages.ingest.files import HEADER, front, record, write


def spans_of(mask: list[int]) -> list[list[int]]:
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return edges.reshape(-1, 2).tolist()


def test_both_forms_give_the_same_columns(tmp_path):
    rng = random.Random(3)
    for round_ in range(30):
        paths = random_trajectories(rng, 8, forks=rng.randint(0, 5))
        full, coded, before = [], [], np.zeros(0, dtype=np.int32)
        for i, tokens in enumerate(paths):
            mask = [rng.randint(0, 1) for _ in tokens]
            ids = np.array(tokens, dtype=np.int32)
            lcp = rng.randint(0, common_prefix(before, ids))  # a writer need not find all that is shared
            full.append(record(f"t{i}", tokens, loss_mask=mask, reward=float(i)))
            coded.append(front(f"t{i}", lcp, tokens[lcp:], spans_of(mask), reward=float(i), keep=0, tb=[0], roles="u"))
            before = ids
        a = read_jsonl(write(tmp_path / f"full{round_}.jsonl", full))
        b = read_jsonl(write(tmp_path / f"front{round_}.jsonl", [HEADER, *coded]))
        assert a.columns.digest() == b.columns.digest()
        np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lcp": 4}, "field lcp: is 4, the line before has 3 tokens"),
        ({"lcp": -1}, "field lcp: is -1, must be an integer of at least 0"),
        ({"lcp": True}, "field lcp: is True"),
        ({"lcp": None}, "field lcp: is null"),
        ({"suffix": [-1]}, "field suffix: entry 0 is -1"),
        ({"suffix": "9"}, "field suffix: is '9', must be a list"),
        ({"loss_spans": [[2, 5]]}, "field loss_spans: entry 0 ends at 5, the trajectory has 4 tokens"),
        ({"loss_spans": [[2, 2]]}, "field loss_spans: entry 0 is [2, 2], must not be empty"),
        (
            {"loss_spans": [[2, 3], [1, 4]]},
            "field loss_spans: entry 1 is [1, 4], must not be empty and must start at 3",
        ),
        ({"loss_spans": [[0, 1.0]]}, "field loss_spans: entry 0 is [0, 1.0], must be [start, end]"),
        ({"loss_spans": 3}, "field loss_spans: is 3, must be a list"),
        ({"tokens": [1]}, "field tokens: does not belong to the front-coded form"),
        ({"loss_span": [[0, 1]]}, "field loss_span: is unknown; did you mean loss_spans?"),
        ({"old_logprobs": [0.0]}, "field old_logprobs: has 1 entries, expected 4"),
    ],
)
def test_fault_of_a_front_coded_line(tmp_path, fields, words):
    lines = [HEADER, front("a", 0, [1, 2, 3], []), front("b", 2, [8, 9], [[2, 4]]) | fields]
    path = write(tmp_path / "front.jsonl", lines)
    with pytest.raises(InputError, match=re.escape(f"front.jsonl:3: trajectory 'b': {words}")):
        read_jsonl(path)


def test_first_line_has_nothing_to_repeat(tmp_path):
    path = write(tmp_path / "front.jsonl", [HEADER, front("a", 1, [2], [])])
    with pytest.raises(InputError, match="field lcp: is 1, the line before has 0 tokens"):
        read_jsonl(path)


def test_missing_field_is_named(tmp_path):
    path = write(tmp_path / "front.jsonl", [HEADER, {"id": "a", "group": "g", "lcp": 0}])
    with pytest.raises(InputError) as caught:
        read_jsonl(path)
    assert re.findall(r"field (\w+): is missing", str(caught.value)) == ["suffix", "loss_spans"]


def test_unknown_format_is_refused(tmp_path):
    path = write(tmp_path / "front.jsonl", [{"format": "rollout-front-2"}])
    with pytest.raises(
        InputError, match=r"front\.jsonl:1: field format: is 'rollout-front-2', known is 'rollout-front-1'"
    ):
        read_jsonl(path)


def test_line_that_is_no_object_is_refused(tmp_path):
    path = tmp_path / "front.jsonl"
    path.write_text('{"format":"rollout-front-1"}\n7\n')
    with pytest.raises(InputError, match=r"front\.jsonl:2: is 7, a record must be an object"):
        read_jsonl(path)
