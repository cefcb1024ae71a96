"""What every ingest stage offers, whatever the data came in."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import PositiveInt

from harts.errors import InputError
from harts.ir import CompactTrie, RolloutBatch
from harts.stages.base import StageConfig
from harts.stages.ingest.advantages import GroupAdvantage, with_group_advantages
from harts.stages.ingest.trie import build_trie


class SharingConfig(StageConfig):
    """How a batch becomes a trie."""

    shared_trained_token: Literal["sum", "once"] = "sum"
    """Loss terms of a trained token that several trajectories share. sum: one for each of them. once: one, of the first
    trajectory of the batch that trains it."""
    group_advantage: GroupAdvantage | None = None
    """Advantages from rewards. centered: reward minus the mean of its group. normalized: that over the group's standard
    deviation + 1e-6. Unset: only advantages that the data holds are used."""
    max_length: PositiveInt | None = None
    """Tokens that a trajectory may have; a longer one is an error. Unset: any number."""


def ingest(batch: RolloutBatch, config: SharingConfig) -> CompactTrie:
    """Apply the options to a checked batch and build its trie.

    Raises:
        InputError: a trajectory is too long, or group advantages cannot be computed.
    """
    if config.max_length is not None:
        _check_length(batch, config.max_length)
    if config.group_advantage is not None:
        batch = with_group_advantages(batch, config.group_advantage)
    return build_trie(batch, config.shared_trained_token)


def _check_length(batch: RolloutBatch, limit: int) -> None:
    columns = batch.columns
    long = np.flatnonzero(columns.length > limit)
    if long.size:
        first = long[0]
        raise InputError(
            f"{batch.source}: trajectory {columns.names[first]!r}: field tokens: has {columns.length[first]} entries, "
            f"max_length is {limit} ({long.size} of {len(columns)} trajectories are longer)"
        )
