"""Text of each kind on the small case, its limit, and its behaviour on large and odd values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harts.ir import RoundPlan
from harts.ir.codec import decode, encode
from harts.ir.text import format_value
from harts.ir.text.pieces import WIDTH, repeats, spans, statistics, table, word, wrapped
from tests.forests import tree_of, tree_of_spec
from tests.ir import cases

STEP = """\
step_plan v2  N=3 K=1 D=1 slots=1 capacity=100
  source: 'test'
  tokens: S=223 C=95 C in microbatches=95
  bound: at least 95, for the slots' heaviest 95; optimal
  objective: paper, costs in compact tokens
  trained: 220 tokens, 3 trajectories
          candidate  cost  slots' heaviest  heaviest replica
          "cut one"   148              148               148
  chosen  whole        95               95                95
  m0: slot 0, replica 0, work 95, cost 95, trajectories 0:3"""

PLAN = """\
round_plan v1  B=64 V=5 Q=3 P=1
  round 1
    q0: v0[0:63] v1[63:65] v2[65:75], from zero, returns s0 at 64
    q1: v4[63:73], from zero, replay 0:63
  round 2
    q2: v3[65:75], from s0, replay 64:65"""

GOLDEN = {
    "columns": """\
columns v1  N=3 S=223
  groups: 1
  tokens per trajectory: min 73, mean 74.3333, max 75
  column      one a       values
  loss_mask   token       true 220 of 223
  reward      trajectory  min -0.5, mean 0.25, max 1, not finite 1
  advantages  token       min -1, mean 0, max 1
  absent: advantage old_logprobs ref_logprobs weight weights temperature temperatures""",
    "rollout_batch": """\
rollout_batch v1  N=3 S=223
  source: 'test'
  tokens: min 1, mean 5.81614, max 11
  groups: 1
  tokens per trajectory: min 73, mean 74.3333, max 75
  column      one a       values
  loss_mask   token       true 220 of 223
  reward      trajectory  min -0.5, mean 0.25, max 1, not finite 1
  advantages  token       min -1, mean 0, max 1
  absent: advantage old_logprobs ref_logprobs weight weights temperature temperatures""",
    "compact_trie": """\
compact_trie v1  N=3 S=223 C=95 shared_trained_token=sum
  sorted  row  name  tokens  lcp  trained
       0    1  t1        75    0       74
       1    2  t2        75   65       74
       2    0  t0        73   63       72""",
    "partitions": """\
partitions v2  Q=2 N=3 D=1 capacity=none
  objective: paper, costs in compact tokens; at least 95 compact tokens
  candidate  name       microbatches  work  heaviest  cost
          0  whole                 1    95        95    95
          1  "cut one"             2   158        85   158
  candidate 0, by sorted position
    m0: work 95, 0:3
  candidate 1, by sorted position
    m0: work 85, 0:2
    m1: work 73, 2:3""",
    "step_plan": STEP,
    "per_microbatch": "\n".join(
        [
            "per_microbatch v1  items=1",
            *("  " + line for line in STEP.splitlines()),
            "  item 0",
            *("    " + line for line in PLAN.splitlines()),
        ]
    ),
    "segment_tree": """\
segment_tree v1  V=5 N=3 C=95 S=223
  v0[0:63] q=3, tokens 1 1 4 7 ...
    v1[63:65] q=2, tokens 1 8
      v2[65:75] q=1, tokens 1 11 3 6 ..., ends t1 at 75
      v3[65:75] q=1, tokens 2 7 10 2 ..., ends t2 at 75
    v4[63:73] q=1, tokens 2 4 7 10 ..., ends t0 at 73""",
    "round_plan": PLAN,
    "semantic_map": """\
semantic_map v1  N=3 M=5 S=223
  trajectory 0: 0:63 75:85
  trajectory 1: 0:75
  trajectory 2: 0:65 85:95""",
    "compact_layout": """\
compact_layout v1  C=95 R=96 Q=3
  round 1
    q0: rows 0:75, positions 0:75, multiplicity 3*63 2*2 1*10
      segments v0@0 v1@63 v2@65
      context - - -
    q1: rows 75:85, positions 63:73, multiplicity 1*10
      segments v4@75
      replay 0:63
      context 60 61 62
      ancestors 0:63
  round 2
    q2: rows 85:95, positions 65:75, multiplicity 1*10
      segments v3@85
      replay 64:65
      context 62 63 64
      ancestors 0:65
  padding 95:96
  semantic_map
    t0: 0:63 75:85
    t1: 0:75
    t2: 0:65 85:95""",
    "compact_outputs": """\
compact_outputs v1
  layout: compact_layout
  hidden: float32[96, 4], min -2, mean 0, max 2
  router_z: float32[], min 0.5, mean 0.5, max 0.5
  router_balance: absent
  expert_load: float32[1, 2], min 200, mean 223, max 246""",
    "semantic_outputs": """\
semantic_outputs v1
  outputs: compact_outputs
  logprobs: float64[220], min -3, mean -1.50641, max 0, not finite 1
  entropy: absent""",
}


@pytest.mark.parametrize("kind", cases.every_kind())
def test_text_of_each_kind(kind: str) -> None:
    value = cases.every_kind()[kind]
    value.verify()
    assert format_value(value) == GOLDEN[kind]
    assert format_value(decode(encode(value))) == GOLDEN[kind]


@pytest.mark.parametrize("limit", [1, 3, 5, 6, 7])
def test_limit_counts_what_it_leaves_out(limit: int) -> None:
    lines = format_value(cases.plan(), limit=limit).splitlines()
    left = 6 - limit
    assert lines == PLAN.splitlines()[:limit] + ([f"... {left} more lines"] if left > 0 else [])


def test_deep_trees_are_printed_without_recursion_and_without_endless_indentation() -> None:
    depth = 5000
    spec = [(-1, 1)]
    for i in range(depth):
        spec += [(2 * i, 1), (2 * i, 1)]
    lines = format_value(_chain(spec)).splitlines()
    assert len(lines) == 1 + len(spec)
    assert max(map(len, lines)) <= WIDTH
    assert any("(depth 5000) v" in line for line in lines)


def _chain(spec: list[tuple[int, int]]) -> object:
    """A tree given by its segments; the tokens are not those of real prefixes, which text does not ask."""
    parent = np.array([p for p, _ in spec], dtype=np.int32)
    start = np.zeros(len(spec), dtype=np.int64)
    for v in range(1, len(spec)):
        start[v] = start[parent[v]] + 1
    tree = tree_of([[1]])
    return replace(
        tree,
        parent=parent,
        start=start,
        offset=np.arange(len(spec) + 1),
        tokens=np.zeros(len(spec), dtype=np.int32),
    )


def test_long_sequences_continue_on_the_next_line() -> None:
    spec = [(-1, 1)]
    for i in range(30):
        spec += [(2 * i, 1), (2 * i, 1)]
    tree = tree_of_spec([(-1, 5), (0, 3), (0, 3)])
    tree = replace(tree, **{name: getattr(_chain(spec), name) for name in ("parent", "start", "offset", "tokens")})
    stem = [0, *range(1, 60, 2)]
    plan = RoundPlan(
        tree=tree,
        chunk_size=64,
        round_offset=cases.ints(0, 1),
        sequence_offset=cases.ints(0, len(spec)),
        segment=np.array(stem + [v for v in range(len(spec)) if v not in stem], dtype=np.int32),
        anchor=cases.ints(0),
        initial_state=cases.small(-1),
        state_sequence=cases.small(0, 0),
        state_position=cases.ints(1, 2),
    )
    first, *rest = format_value(plan).splitlines()[2:]
    assert first.startswith("    q0: v0[0:1] v1[1:2]")
    assert len(rest) > 3
    assert all(line.startswith("        v") and len(line) <= WIDTH for line in rest)
    assert rest[-1].endswith(", from zero, returns s0 at 1, s1 at 2")


def test_everyone_who_ends_in_a_segment_is_named_with_the_position() -> None:
    tree = tree_of([[5, 6, 7], [5, 6, 7], [5]])
    assert format_value(tree).splitlines()[1] == "  v0[0:3] q=3, tokens 5 6 7, ends t0 at 3, t1 at 3, t2 at 1"


def test_names_cannot_break_lines() -> None:
    tree = tree_of([[1]])
    odd = replace(tree, columns=replace(tree.columns, names=("a\nb, c",)))
    assert format_value(odd).splitlines()[1] == '  v0[0:1] q=1, tokens 1, ends "a\\nb, c" at 1'


def test_pieces() -> None:
    assert spans(cases.ints(3, 4, 5, 9, 2, 1)) == ["3:6", "9:10", "2:3", "1:2"]
    assert spans(cases.ints()) == repeats(cases.ints()) == []
    assert repeats(cases.ints(2, 2, 1)) == ["2*2", "1*1"]
    assert list(map(word, ("plain", "", "two words", "caf\u00e9"))) == ["plain", '""', '"two words"', "caf\u00e9"]
    assert statistics(cases.ints()) == "empty"
    assert statistics(np.array([np.nan, np.inf])) == "not finite 2"
    assert statistics(cases.ints(1 << 62)) == f"min {1 << 62}, mean 4.61169e+18, max {1 << 62}"
    assert list(table(1, ("n", "name"), [(-5, "a"), (10, "bc")])) == ["  n  name", " -5  a", " 10  bc"]
    assert list(wrapped(2, ["x" * 200, "y"])) == ["  " + "x" * 200, "      y"]
