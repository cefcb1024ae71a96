"""From records to columns, with every check that one step's data needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from harts.errors import InputError
from harts.ir import RolloutBatch
from harts.stages.ingest.columns import GrowingColumns
from harts.stages.ingest.declared import Declared, check_declared
from harts.stages.ingest.faults import RecordFaults
from harts.stages.ingest.row import read_row
from harts.stages.ingest.values import shown


class Located(NamedTuple):
    """A record in the full form, and where it stands."""

    where: str
    record: Mapping[str, Any]


def rollout_batch(records: Iterable[Mapping[str, Any]], source: str) -> RolloutBatch:
    """Make a batch of records whose fields are lists, arrays or tensors on the host, single numbers among them.

    Each record holds `id` and `group` (text), `tokens` [n] (ids from 0 to 2^31 - 1) and `loss_mask` [n] (0, 1 or
    booleans; the first entry has no effect, as the first token has no log-prob). Optional, and held by all or by none:
    `reward`; `advantage` or `advantages` [n]; `old_logprobs` and `ref_logprobs` [n], in nats; `weight` or `weights`
    [n]; `temperature` or `temperatures` [n]. `reward_known: false` says that the reward is a placeholder; it becomes
    NaN. `parent` with `shared_length` declares that the first `shared_length` tokens are those of another record: this
    is checked and otherwise unused. Other fields are metadata.

    Args:
        records: one a trajectory, in the caller's order.
        source: a word for where they came from; errors name `source[index]`.

    Raises:
        InputError: all faults of the first faulty record (of aligned values once its tokens can be read), or there is
            no record.
    """
    return collect((Located(f"{source}[{i}]", record) for i, record in enumerate(records)), source)


def collect(records: Iterable[Located], source: str) -> RolloutBatch:
    """As `rollout_batch`, of records that know their place. They are read one by one."""
    grown = GrowingColumns()
    declared: list[Declared] = []
    for where, record in _objects(records):
        faults = RecordFaults(where, record)
        row = read_row(record, faults)
        grown.check(row, faults)
        faults.raise_any()
        if "parent" in row:
            declared.append(Declared(where, row["id"], row["parent"], row["shared_length"]))
        grown.add(row, where)
    if len(grown) == 0:
        raise InputError(f"{source}: holds 0 trajectories, a step needs at least 1")
    batch = grown.finish(source)
    check_declared(batch, declared)
    return batch


def _objects(records: Iterable[Located]) -> Iterator[Located]:
    for each in records:
        if not isinstance(each.record, Mapping):
            raise InputError(f"{each.where}: is {shown(each.record)}, a record must be an object")
        yield each
