"""A schedule as it is meant: walked row by row, where a state is the list of the rows that it has absorbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from harts.backends.linear.tree import schedule as tree_schedule
from harts.backends.linear.tree.grid import CHUNK, Grid
from harts.backends.linear.tree.schedule import Schedule
from harts.backends.linear.tree.settlement import Settlement

Path = list[int]
"""Rows from the start of a trajectory on; rows below 0 stand for given states."""


class Walk(NamedTuple):
    """What the sequences of a schedule compute."""

    path: dict[int, Path]
    """Own row -> all that its output depends on, itself last."""
    chunk_start: dict[int, int]
    """Own row -> rows absorbed before its chunk."""
    bank: dict[int, Path]
    """Slot -> state."""


def walk(schedule: Schedule, given: Sequence[Path] = ()) -> Walk:
    """Run all sequences in forward order; every chunk of both buffers is walked exactly once."""
    rows = [list(range(schedule.body.rows))]
    replayed = [[False] * schedule.body.rows]
    chunks = [bounds_of_chunks(schedule.body)]
    if schedule.heads is not None:
        rows.append(schedule.heads.row.tolist())
        replayed.append(schedule.heads.replayed.flatten().tolist())
        chunks.append(bounds_of_chunks(schedule.heads.grid))
    found = Walk({}, {}, dict(enumerate(given)))
    for first, last, source, _ in schedule.forward_order.tolist():
        assert source < 0 or source in found.bank, f"slot {source} is not produced yet"
        state = found.bank[source] if source >= 0 else []
        for in_head, row, end, chunk, slot in schedule.spans[first:last].tolist():
            count = -(-(end - row) // CHUNK)
            assert 1 <= count <= tree_schedule.MAX_CHUNKS
            for i in range(count):
                begin, stop = row + i * CHUNK, min(row + (i + 1) * CHUNK, end)
                assert chunks[in_head].pop(chunk + i, None) == (begin, stop)
                after = state + rows[in_head][begin:stop]
                for at in range(begin, stop):
                    if not replayed[in_head][at]:
                        own = rows[in_head][at]
                        assert own not in found.path, f"row {own} is computed twice"
                        found.path[own] = after[: len(state) + at - begin + 1]
                        found.chunk_start[own] = len(state)
                state = after
            if slot >= 0:
                assert slot not in found.bank, f"slot {slot} is written twice"
                found.bank[slot] = state
    assert not any(chunks), "a chunk is not walked"
    assert sorted(found.bank) == list(range(schedule.slots))
    return found


def bounds_of_chunks(grid: Grid) -> dict[int, tuple[int, int]]:
    """Rows of each chunk of a grid."""
    bounds = grid.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == grid.rows
    assert len(bounds) == grid.runs + 1
    assert all(a < b for a, b in pairwise(bounds))
    found = {}
    for number, (run, chunk) in enumerate(grid.chunk_indices.tolist()):
        begin = bounds[run] + chunk * CHUNK
        assert begin < bounds[run + 1]
        found[number] = begin, min(begin + CHUNK, bounds[run + 1])
    assert len(found) == grid.chunks
    return found


def check_backward_order(schedule: Schedule) -> None:
    """Consumers are done before their producer asks for them, and each leaves its gradient in a place of its own."""
    assert sorted(schedule.backward_order.tolist()) == sorted(schedule.forward_order.tolist())
    consumers = schedule.consumers.tolist()
    assert len(consumers) == schedule.slots + 1
    assert (consumers[0], consumers[-1]) == (0, schedule.places)
    done: Counter[int] = Counter()
    places = []
    for first, last, source, place in schedule.backward_order.tolist():
        for slot in schedule.spans[first:last, -1].tolist():
            assert slot < 0 or done[slot] == consumers[slot + 1] - consumers[slot], f"slot {slot} misses a consumer"
        if source < 0:
            assert place == -1
        else:
            done[source] += 1
            assert consumers[source] <= place < consumers[source + 1]
            places.append(place)
    assert sorted(places) == list(range(schedule.places))


def check_settlements(schedule: Schedule) -> None:
    """Own head rows go to their rows, replay rows are added to theirs; rows and replays are named once."""
    body = {row for begin, end in bounds_of_chunks(schedule.body).values() for row in range(begin, end)}
    heads = schedule.heads
    if heads is None:
        assert body == set(range(schedule.body.rows))
        return
    row, replayed = heads.row.tolist(), heads.replayed.flatten()
    replays, owned = torch.nonzero(replayed).flatten().tolist(), torch.nonzero(~replayed).flatten().tolist()
    for where, wanted in ((heads.outputs, []), (heads.gradients, replays)):
        named, own = where.row.tolist(), dict(zip(where.row.tolist(), where.own.tolist(), strict=True))
        assert len(own) == len(named), "a row is named twice"
        assert sorted(each for each in own.values() if each >= 0) == owned
        assert all(row[head] == each for each, head in own.items() if head >= 0)
        sources = replays_of(where)
        assert sorted(source for each in sources for source in each) == wanted
        for each, found in zip(named, sources, strict=True):
            assert found == sorted(found)
            assert all(row[source] == each for source in found)
            assert found or own[each] >= 0, f"nothing is settled in row {each}"
    assert body.isdisjoint(row[head] for head in owned)
    assert body | {row[head] for head in owned} == set(range(schedule.body.rows))


def replays_of(where: Settlement) -> list[list[int]]:
    bounds, source = where.offset.tolist(), where.source.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(source))
    return [source[a:b] for a, b in pairwise(bounds)]
