"""Input sequences as they are planned one by one, and the round plan that they make together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harts.ir import RoundPlan, SegmentTree
from harts.ir.runs import offsets

ZERO_STATE = -1


@dataclass
class Sequence:
    """One input sequence under construction."""

    round: int
    """From 0."""
    anchor: int
    """Position of the initial state."""
    source: int
    """Index into `Sequences.states`, or ZERO_STATE."""
    segments: list[int] = field(default_factory=list)


class Sequences:
    """All sequences of a microbatch in the order of their making, and the states that they hand over."""

    def __init__(self, tree: SegmentTree, chunk_size: int) -> None:
        self.tree, self.chunk_size = tree, chunk_size
        self.made: list[Sequence] = []
        self.states: dict[tuple[int, int], int] = {}

    def start(self, round_: int, anchor: int, source: int) -> int:
        """Open a sequence; returns its number."""
        self.made.append(Sequence(round_, anchor, source))
        return len(self.made) - 1

    def state(self, sequence: int, position: int) -> int:
        """The state of a sequence at a position, to be returned by it unless it is the one that it starts from."""
        if position == 0:
            return ZERO_STATE
        if position == self.made[sequence].anchor:
            return self.made[sequence].source
        return self.states.setdefault((sequence, position), len(self.states))

    def plan(self) -> RoundPlan:
        """Number sequences round by round, states by their sequence and position."""
        order = sorted(range(len(self.made)), key=lambda i: self.made[i].round)
        number = {old: new for new, old in enumerate(order)}
        made = [self.made[i] for i in order]
        states = sorted(self.states, key=lambda state: (number[state[0]], state[1]))
        rank = {self.states[state]: i for i, state in enumerate(states)} | {ZERO_STATE: ZERO_STATE}
        return RoundPlan(
            tree=self.tree,
            chunk_size=self.chunk_size,
            round_offset=offsets(np.bincount([each.round for each in made]).astype(np.int64)),
            sequence_offset=offsets(np.array([len(each.segments) for each in made], dtype=np.int64)),
            segment=np.array([v for each in made for v in each.segments], dtype=np.int32),
            anchor=np.array([each.anchor for each in made], dtype=np.int64),
            initial_state=np.array([rank[each.source] for each in made], dtype=np.int32),
            state_sequence=np.array([number[sequence] for sequence, _ in states], dtype=np.int32),
            state_position=np.array([position for _, position in states], dtype=np.int64),
        )
