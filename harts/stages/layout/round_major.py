"""The layout stage `round_major`: one row order for all layers, and the views that they take of it (SPEC section 4)."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveInt

from harts.errors import PlanError
from harts.ir import CompactLayout, RoundPlan, SemanticMap
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets
from harts.stages.base import Stage, StageConfig
from harts.stages.layout.ancestors import Place, Ragged, Runs, ancestor_runs, joined, last_rows, place, ragged


class RoundMajor(Stage[RoundPlan, CompactLayout]):
    """Rows of an input sequence are contiguous, sequences of a round are contiguous, rounds follow each other."""

    class Config(StageConfig):
        """What the model and the hardware want."""

        conv_width: PositiveInt
        """Tokens in a window of the model's short convolution, w; the current one included."""
        row_multiple: PositiveInt = 1
        """Rows are padded to a multiple of it, with rows that nobody owns."""
        max_expanded_rows: PositiveInt | None = None
        """Cap on the key/value rows of all branches with their ancestors, sum of h + l, which full-attention backends
        that expand hold for a while; others hold none of them. None is no cap."""
        max_replay_rows: PositiveInt | None = None
        """Cap on the rows that linear attention replays; none is no cap."""

    def run(self, plan: RoundPlan, /) -> CompactLayout:
        """Lay out one microbatch.

        Raises:
            PlanError: a cap is exceeded; neither kind of row is in the partition's capacity.
        """
        self._check_caps(plan)
        tree = plan.tree
        where = place(plan)
        ancestors = ancestor_runs(plan, where)
        tokens = len(tree.tokens)
        padding = (0, -tokens % self.config.row_multiple)
        rows, length = plan.segment, tree.length[plan.segment]
        mapped = _semantic_map(plan, where, ancestors)
        replay = ragged([last_rows(runs, n) for runs, n in zip(ancestors, plan.replay.tolist(), strict=True)])
        views = ragged(ancestors)
        return CompactLayout(
            plan=plan,
            semantic_map=mapped,
            rows=tokens,
            input_ids=np.pad(tree.tokens[expand_runs(tree.offset[rows], length)], padding),
            position_ids=np.pad(expand_runs(tree.start[rows], length), padding),
            multiplicity=np.pad(_multiplicity(mapped, tokens), padding),
            segment_row=where.segment_row,
            cu_rows=where.cu_rows,
            replay_offset=offsets(plan.replay),
            replay_row=replay.rows(),
            context_row=_context(ancestors, self.config.conv_width - 1),
            ancestor_offset=views.offset,
            ancestor_row=views.row,
            ancestor_length=views.length,
        )

    def _check_caps(self, plan: RoundPlan) -> None:
        expanded, replayed = int(plan.tree.end[plan.last].sum()), int(plan.replay.sum())
        of = f"of a microbatch of {len(plan.tree.tokens)} compact tokens in {len(plan.anchor)} branches"
        limit = self.config.max_expanded_rows
        if limit is not None and expanded > limit:
            text = f"the ancestor key/value views {of} have {expanded} rows, allowed are {limit}"
            raise PlanError(f"layout.max_expanded_rows: {text}")
        limit = self.config.max_replay_rows
        if limit is not None and replayed > limit:
            raise PlanError(f"layout.max_replay_rows: the sequences {of} replay {replayed} rows, allowed are {limit}")


def _semantic_map(plan: RoundPlan, where: Place, ancestors: list[Runs]) -> SemanticMap:
    """Path of every trajectory, cut to its length."""
    tree = plan.tree
    sequence = where.sequence_of[tree.tail]
    begin = where.cu_rows[sequence]
    stop = where.segment_row[tree.tail] + tree.columns.length - tree.start[tree.tail]
    tails = zip(sequence.tolist(), begin.tolist(), (stop - begin).tolist(), strict=True)
    runs: Ragged = ragged([joined(ancestors[i], row, length) for i, row, length in tails])
    return SemanticMap(runs.offset, runs.row, runs.length)


def _multiplicity(mapped: SemanticMap, rows: int) -> Int64:
    """Semantic positions of each row, [rows]: runs that have begun minus runs that have ended."""
    step = np.bincount(mapped.run_row, minlength=rows + 1)
    step -= np.bincount(mapped.run_row + mapped.run_length, minlength=rows + 1)
    return np.asarray(np.cumsum(step)[:rows], dtype=np.int64)


def _context(ancestors: list[Runs], width: int) -> Int64:
    """The last `width` ancestor rows of each sequence, oldest first, -1 where the path is shorter, [Q, width]."""
    runs = ragged([last_rows(each, width) for each in ancestors])
    per = np.add.reduceat(np.append(runs.length, 0), runs.offset[:-1]) * (np.diff(runs.offset) > 0)
    context = np.full((len(ancestors), width), -1, dtype=np.int64)
    context.reshape(-1)[expand_runs(np.arange(1, len(ancestors) + 1) * width - per, per)] = runs.rows()
    return context
