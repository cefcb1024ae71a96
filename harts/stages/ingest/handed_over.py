"""The ingest stage `batch`: rollouts that a trainer holds as arrays."""

from __future__ import annotations

from harts.errors import InputError
from harts.ir import CompactTrie, RolloutBatch
from harts.stages.base import Stage
from harts.stages.ingest.faults import RecordFaults
from harts.stages.ingest.row import row_faults, rows_of
from harts.stages.ingest.sharing import SharingConfig, ingest


class HandedOver(Stage[RolloutBatch, CompactTrie]):
    """Check a batch that the caller built, or made with `rollout_batch`, and build its trie."""

    class Config(SharingConfig):
        """How the batch becomes a trie."""

    config: Config

    def run(self, batch: RolloutBatch, /) -> CompactTrie:
        """Build the trie. A NaN reward says unknown.

        Raises:
            VerifyError: the batch breaks an invariant of its kind.
            InputError: all faults of the first faulty trajectory, or there is none.
        """
        batch.columns.verify()
        batch.verify()
        if len(batch.columns) == 0:
            raise InputError(f"{batch.source}: holds 0 trajectories, a step needs at least 1")
        for row in rows_of(batch):
            faults = RecordFaults(batch.source, row)
            for field, what in row_faults(row):
                faults.add(field, what)
            faults.raise_any()
        return ingest(batch, self.config)
