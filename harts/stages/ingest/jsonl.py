"""The ingest stage `jsonl`: rollouts from a file of JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import PositiveInt

from harts.ir import CompactTrie, RolloutBatch
from harts.stages.base import Stage
from harts.stages.ingest.front import FrontDecoder, is_header
from harts.stages.ingest.lines import read_lines
from harts.stages.ingest.records import Located, collect
from harts.stages.ingest.sharing import SharingConfig, ingest


class Jsonl(Stage[None, CompactTrie]):
    """Read one step's trajectories, in the full or the front-coded form, and build their trie.

    Planning itself holds about 5 bytes a semantic token on the host (8 more for each per-token column of numbers, 1 for
    `shared_trained_token: once`) and one record at a time beside it. Checking the values between stages
    (`observe.verify: on`) takes more. The fields of a record are those of `rollout_batch`.
    """

    class Config(SharingConfig):
        """The file, and how it becomes a trie."""

        path: Path
        """JSON lines, plain, .gz or .xz."""
        limit: PositiveInt | None = None
        """Read the first this many trajectories only; a declared parent must be among them. Unset: all."""

    config: Config

    def run(self, value: None, /) -> CompactTrie:
        """Read the file.

        Raises:
            InputError: the file cannot be read, or all faults of its first faulty record, each as
                `file:line: trajectory NAME: field FIELD: what`.
        """
        return ingest(read_jsonl(self.config.path, self.config.limit), self.config)


def read_jsonl(path: Path, limit: int | None = None) -> RolloutBatch:
    """The trajectories of a file, or the first `limit` of them. Errors are those of `Jsonl.run`."""
    return collect(islice(_records(path), limit), str(path))


def _records(path: Path) -> Iterator[Located]:
    decoder: FrontDecoder | None = None
    for position, (number, record) in enumerate(read_lines(path)):
        where = f"{path}:{number}"
        if position == 0 and is_header(record, where):
            decoder = FrontDecoder()
        elif decoder is not None and isinstance(record, dict):
            yield Located(where, decoder.decode(where, record))
        else:
            yield Located(where, record)
