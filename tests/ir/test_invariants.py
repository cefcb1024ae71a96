"""A value that breaks an invariant is refused with its kind, the field and the first bad index."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harts.errors import VerifyError
from tests.ir.cases import every_kind, ints, small

KINDS = every_kind()


def poked(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    """The array with one entry changed."""
    changed = array.copy()
    changed[index] = value
    return changed


def entry(kind: str, field: str, index: Any, value: Any) -> dict[str, Any]:
    return {field: poked(getattr(KINDS[kind], field), index, value)}


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("columns", {"names": ("t0", "t1", "t1")}, "columns.names: names must be unique"),
    ("columns", {"names": ("t0",)}, "columns.names: there must be one name a trajectory"),
    ("columns", entry("columns", "offset", 0, 1), "columns.offset[0]: offsets must start at 0"),
    ("columns", entry("columns", "offset", 1, 0), "columns.offset[0]: a trajectory must have at least one token"),
    ("columns", entry("columns", "offset", 3, 222), "columns.offset: offsets must end at the token count"),
    ("columns", entry("columns", "group", 2, 1), "columns.group[2]: must index groups"),
    ("columns", {"advantage": np.zeros(3)}, "columns.advantage: excludes advantages"),
    ("rollout_batch", entry("rollout_batch", "tokens", 5, -1), "rollout_batch.tokens[5]: a token id must not be"),
    ("compact_trie", entry("compact_trie", "order", 1, 0), "compact_trie.order[1]: must be a permutation"),
    ("compact_trie", entry("compact_trie", "lcp", 0, 1), "compact_trie.lcp[0]: the first trajectory shares with none"),
    ("compact_trie", entry("compact_trie", "lcp", 1, -1), "compact_trie.lcp[1]: must not be negative"),
    ("compact_trie", entry("compact_trie", "lcp", 1, 80), "compact_trie.lcp[1]: must not exceed either trajectory"),
    ("compact_trie", entry("compact_trie", "lcp", 1, 64), "compact_trie.lcp[1]: must be the exact LCP"),
    ("compact_trie", entry("compact_trie", "lcp", 2, 62), "compact_trie.lcp[2]: must be the exact LCP"),
    ("compact_trie", entry("compact_trie", "loss_mask", 0, True), "compact_trie.loss_mask[0]: must not train a token"),
    ("compact_trie", {"shared_trained_token": "twice"}, "compact_trie.shared_trained_token: must be sum or once"),
    ("partitions", {"names": ("one",)}, "partitions.names: there must be one name a candidate"),
    ("partitions", {"replicas": 0}, "partitions.replicas: must be at least 1"),
    ("partitions", {"replicas": 2}, "partitions.microbatch[0]: D must divide the number of microbatches"),
    ("partitions", entry("partitions", "microbatch", (1, 0), -1), "partitions.microbatch[1]: every trajectory must be"),
    (
        "partitions",
        entry("partitions", "microbatch", (1, 2), 2),
        "partitions.microbatch[1]: no microbatch may be empty",
    ),
    ("partitions", {"capacity": 94}, "partitions.microbatch[0]: no microbatch may exceed the capacity"),
    ("partitions", {"objective": "best"}, "partitions.objective: must be paper or critical"),
    ("partitions", {"cost": ints(95, 85)}, "partitions.cost: there must be one a microbatch"),
    ("partitions", {"lower_bound": 96}, "partitions.lower_bound[0]: no candidate may need fewer compact tokens"),
    ("partitions", {"cost": ints(95, 85, 74)}, "partitions.cost[2]: must be the work, if the unit is compact tokens"),
    ("step_plan", {"replicas": 2}, "step_plan.work: D must divide the number of microbatches"),
    ("step_plan", entry("step_plan", "microbatch", 1, 1), "step_plan.microbatch[1]: must exist"),
    ("step_plan", {"work": ints(90, 5), "cost": ints(90, 5)}, "step_plan.work[1]: no microbatch may be empty"),
    ("step_plan", {"capacity": 94}, "step_plan.work[0]: no microbatch may exceed the capacity"),
    ("step_plan", {"chosen": 2}, "step_plan.chosen: must be a candidate"),
    ("step_plan", {"chosen": 0}, "step_plan.scores: the total must be the costs' sum"),
    ("step_plan", {"lower_bound": 96}, "step_plan.lower_bound: the work cannot be below it"),
    ("step_plan", {"lower_bound": 94}, "step_plan.lower_bound: each unique prefix is computed once"),
    ("step_plan", {"objective": "best"}, "step_plan.objective: must be paper or critical"),
    (
        "step_plan",
        {"cost": ints(94), "scores": np.array([[94] * 3, [94] * 3], dtype=np.int64)},
        "step_plan.cost[0]: must be the work, if the unit is compact tokens",
    ),
    ("per_microbatch", {"items": ()}, "per_microbatch.items: there must be one item a microbatch"),
    (
        "per_microbatch",
        {
            "step": replace(KINDS["step_plan"], work=ints(90, 5), cost=ints(90, 5)),
            "items": (KINDS["round_plan"], KINDS["segment_tree"]),
        },
        "per_microbatch.items: all items must be of one kind",
    ),
    (
        "per_microbatch",
        {
            "step": replace(KINDS["step_plan"], work=ints(90, 5), cost=ints(90, 5)),
            "items": (KINDS["round_plan"], KINDS["round_plan"]),
        },
        "per_microbatch.items[1]: must hold the trajectories that the step puts there",
    ),
    ("segment_tree", entry("segment_tree", "parent", 1, 2), "segment_tree.parent[1]: a parent must come before"),
    ("segment_tree", entry("segment_tree", "parent", 1, -2), "segment_tree.parent[1]: a parent must come before"),
    ("segment_tree", entry("segment_tree", "offset", 0, 1), "segment_tree.offset[0]: offsets must start at 0"),
    ("segment_tree", entry("segment_tree", "offset", 1, 65), "segment_tree.offset[1]: a segment must have at least"),
    (
        "segment_tree",
        entry("segment_tree", "offset", 5, 94),
        "segment_tree.offset: offsets must end at the token count",
    ),
    ("segment_tree", entry("segment_tree", "start", 4, 62), "segment_tree.start[4]: a segment must start where its"),
    ("segment_tree", entry("segment_tree", "tokens", 85, 1), "segment_tree.tokens[85]: siblings must differ in their"),
    ("segment_tree", entry("segment_tree", "key", 1, 0), "segment_tree.key[0]: rows of the caller's batch must ascend"),
    ("segment_tree", entry("segment_tree", "tail", 0, 5), "segment_tree.tail[0]: must be a segment"),
    (
        "segment_tree",
        entry("segment_tree", "tail", 0, 0),
        "segment_tree.tail[0]: a trajectory must end inside its last",
    ),
    ("segment_tree", entry("segment_tree", "tail", 1, 3), "segment_tree.tail[2]: a leaf must end where a trajectory"),
    (
        "segment_tree",
        {"parent": small(-1, 0, 1, 1, 1), "start": ints(0, 63, 65, 65, 65)},
        "segment_tree.parent[0]: a segment with one child must be one segment with it",
    ),
    ("round_plan", {"chunk_size": 0}, "round_plan.chunk_size: must be at least 1"),
    ("round_plan", entry("round_plan", "round_offset", 0, 1), "round_plan.round_offset[0]: offsets must start at 0"),
    ("round_plan", {"round_offset": ints(0, 2, 2, 3)}, "round_plan.round_offset[1]: no round may be empty"),
    ("round_plan", {"round_offset": ints(0, 2)}, "round_plan.round_offset: offsets must end at the sequence count"),
    ("round_plan", entry("round_plan", "sequence_offset", 3, 6), "round_plan.sequence_offset: offsets must end at the"),
    ("round_plan", entry("round_plan", "sequence_offset", 1, 0), "round_plan.sequence_offset[0]: no sequence may be"),
    ("round_plan", entry("round_plan", "segment", 4, 4), "round_plan.segment[3]: every segment must run exactly once"),
    ("round_plan", {"segment": small(0, 4, 2, 1, 3)}, "round_plan.segment[2]: a segment inside a sequence must follow"),
    ("round_plan", entry("round_plan", "anchor", 1, 64), "round_plan.anchor[1]: must not be past the first segment"),
    ("round_plan", entry("round_plan", "anchor", 2, 63), "round_plan.anchor[2]: replay must begin on a chunk boundary"),
    ("round_plan", entry("round_plan", "initial_state", 2, 1), "round_plan.initial_state[2]: must be a state or -1"),
    ("round_plan", entry("round_plan", "initial_state", 2, -1), "round_plan.initial_state[2]: the zero state is at"),
    ("round_plan", entry("round_plan", "state_sequence", 0, 3), "round_plan.state_sequence[0]: must be a sequence"),
    ("round_plan", {"state_position": ints(76)}, "round_plan.state_position[0]: a state must be taken inside"),
    ("round_plan", {"state_position": ints(63)}, "round_plan.state_position[0]: a state must be taken at a chunk"),
    ("round_plan", {"round_offset": ints(0, 3)}, "round_plan.initial_state[2]: a state must come from an earlier"),
    (
        "round_plan",
        entry("round_plan", "anchor", 2, 0),
        "round_plan.initial_state[2]: a state must be taken at the anchor",
    ),
    (
        "round_plan",
        entry("round_plan", "state_sequence", 0, 1),
        "round_plan.initial_state[2]: a state must come from the",
    ),
    ("semantic_map", entry("semantic_map", "run_offset", 0, 1), "semantic_map.run_offset[0]: offsets must start at 0"),
    (
        "semantic_map",
        entry("semantic_map", "run_offset", 1, 0),
        "semantic_map.run_offset[0]: every trajectory must have",
    ),
    ("semantic_map", entry("semantic_map", "run_offset", 3, 4), "semantic_map.run_offset: offsets must end at the run"),
    ("semantic_map", entry("semantic_map", "run_length", 2, 0), "semantic_map.run_length[2]: no run may be empty"),
    ("semantic_map", entry("semantic_map", "run_row", 1, -1), "semantic_map.run_row[1]: must be a row"),
    ("compact_layout", {"rows": 96}, "compact_layout.rows: must be the tree's token count"),
    (
        "compact_layout",
        entry("compact_layout", "cu_rows", 1, 74),
        "compact_layout.cu_rows[1]: must be where the plan's",
    ),
    ("compact_layout", entry("compact_layout", "segment_row", 3, 75), "compact_layout.segment_row[3]: must be where"),
    ("compact_layout", entry("compact_layout", "input_ids", 7, 39), "compact_layout.input_ids[7]: must be the tree's"),
    ("compact_layout", entry("compact_layout", "position_ids", 80, 0), "compact_layout.position_ids[80]: must be the"),
    (
        "compact_layout",
        entry("compact_layout", "replay_offset", 0, 1),
        "compact_layout.replay_offset[0]: offsets must st",
    ),
    (
        "compact_layout",
        entry("compact_layout", "replay_offset", 1, -1),
        "compact_layout.replay_offset[0]: offsets must n",
    ),
    (
        "compact_layout",
        entry("compact_layout", "replay_offset", 3, 63),
        "compact_layout.replay_offset: offsets must end",
    ),
    ("compact_layout", entry("compact_layout", "replay_offset", 1, 1), "compact_layout.replay_offset[0]: must replay"),
    (
        "compact_layout",
        entry("compact_layout", "replay_row", 3, 95),
        "compact_layout.replay_row[3]: must be a token's row",
    ),
    (
        "compact_layout",
        entry("compact_layout", "replay_row", 3, 5),
        "compact_layout.replay_row[2]: must be the true anc",
    ),
    (
        "compact_layout",
        entry("compact_layout", "replay_row", 63, 63),
        "compact_layout.replay_row[63]: must be the true",
    ),
    ("compact_layout", entry("compact_layout", "context_row", (1, 0), 95), "compact_layout.context_row[1]: must be a"),
    (
        "compact_layout",
        entry("compact_layout", "context_row", (1, 0), 61),
        "compact_layout.context_row[1]: must be the",
    ),
    ("compact_layout", entry("compact_layout", "context_row", (0, 2), 3), "compact_layout.context_row[0]: must be the"),
    (
        "compact_layout",
        entry("compact_layout", "ancestor_offset", 3, 3),
        "compact_layout.ancestor_offset: offsets must",
    ),
    (
        "compact_layout",
        entry("compact_layout", "ancestor_row", 1, -1),
        "compact_layout.ancestor_row[1]: must be a token",
    ),
    (
        "compact_layout",
        entry("compact_layout", "ancestor_row", 1, 1),
        "compact_layout.ancestor_row[2]: must be the seq",
    ),
    (
        "compact_layout",
        entry("compact_layout", "ancestor_length", 1, 64),
        "compact_layout.ancestor_row[2]: must be the",
    ),
    (
        "compact_layout",
        entry("compact_layout", "ancestor_length", 1, 0),
        "compact_layout.ancestor_length[1]: must stay",
    ),
    (
        "compact_layout",
        {"semantic_map": replace(KINDS["semantic_map"], run_row=ints(0, 75, 0, 0, 87))},
        "compact_layout.semantic_map[4]: must map to tokens' rows",
    ),
    (
        "compact_layout",
        {"semantic_map": replace(KINDS["semantic_map"], run_row=ints(0, 85, 0, 0, 75))},
        "compact_layout.semantic_map[0]: must map each trajectory to its path",
    ),
    ("compact_layout", entry("compact_layout", "multiplicity", 0, 4), "compact_layout.multiplicity[0]: must count"),
    ("compact_layout", entry("compact_layout", "multiplicity", 95, 1), "compact_layout.multiplicity[95]: must count"),
    ("compact_outputs", {"hidden": np.zeros((95, 4))}, "compact_outputs.hidden: there must be one hidden state a row"),
    ("semantic_outputs", {"logprobs": np.zeros(219)}, "semantic_outputs.logprobs: there must be n - 1 a trajectory"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_are_sound(kind: str):
    KINDS[kind].verify()


@pytest.mark.parametrize(("kind", "change", "message"), BROKEN, ids=[message for _, _, message in BROKEN])
def test_a_broken_invariant_is_named(kind: str, change: dict[str, Any], message: str):
    value = replace(KINDS[kind], **change)
    with pytest.raises(VerifyError) as raised:
        value.verify()
    assert str(raised.value).startswith(message)


def test_dtype_and_size_are_checked_when_a_value_is_made():
    tree = KINDS["segment_tree"]
    with pytest.raises(VerifyError, match=r"segment_tree.parent: is int64, declared is int32"):
        replace(tree, parent=tree.parent.astype(np.int64))
    with pytest.raises(VerifyError, match=r"segment_tree.offset: has size 5 where V\+1 is 6"):
        replace(tree, offset=tree.offset[:-1])
    with pytest.raises(VerifyError, match=r"segment_tree.start: has 2 dimensions, declared are 1"):
        replace(tree, start=tree.start[:, None])


def test_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        KINDS["segment_tree"].parent[0] = 3
