"""Packed calls as executions: states from outside, and the states that are asked for."""

from itertools import pairwise

import numpy as np
import torch

from harts.backends.linear.tree.executions import call_execution
from harts.backends.linear.tree.grid import CHUNK
from tests.backends.linear.calls import packed_call
from tests.backends.linear.tree.walk import check_backward_order, check_settlements, walk

HOST = torch.device("cpu")
LENGTHS = (2 * CHUNK + 3, 1, CHUNK, 3 * CHUNK)


def check(*states: tuple[int, int]) -> int:
    """Check the execution of a call; returns its slots."""
    bounds = np.cumsum([0, *LENGTHS]).tolist()
    execution = call_execution(packed_call(CHUNK, bounds, states), HOST)
    given = [[-1 - sequence] for sequence in range(len(LENGTHS))]
    found = walk(execution.schedule, given)
    rows = [list(range(a, b)) for a, b in pairwise(bounds)]
    for sequence, mine in enumerate(rows):
        for place, row in enumerate(mine):
            assert found.path[row] == given[sequence] + mine[: place + 1]
            assert found.chunk_start[row] == 1 + place // CHUNK * CHUNK
    wanted = [given[sequence] + rows[sequence][:offset] for sequence, offset in states]
    assert [found.bank[slot] for slot in execution.slot_of_state.tolist()] == wanted
    assert execution.schedule.given == len(LENGTHS)
    check_backward_order(execution.schedule)
    check_settlements(execution.schedule)
    return execution.schedule.slots


def test_no_state_is_asked_for():
    assert check() == len(LENGTHS)


def test_a_state_after_no_row_is_the_given_one():
    assert check((1, 0), (3, 0), (0, 0)) == len(LENGTHS)


def test_states_at_boundaries_and_at_ends_in_any_order():
    asked = [(3, 2 * CHUNK), (0, 2 * CHUNK + 3), (2, CHUNK), (0, CHUNK), (1, 1), (3, 3 * CHUNK), (0, 2 * CHUNK)]
    assert check(*asked) == len(LENGTHS) + len(asked)


def test_requests_for_one_and_the_same_state_share_its_slot():
    assert check((0, CHUNK), (3, CHUNK), (0, CHUNK), (2, 0), (2, 0), (1, 1), (1, 1)) == len(LENGTHS) + 3


def test_a_slot_of_a_given_state_has_one_consumer_and_no_other_slot_has_any():
    bounds = np.cumsum([0, *LENGTHS]).tolist()
    schedule = call_execution(packed_call(CHUNK, bounds, [(0, CHUNK), (3, CHUNK)]), HOST).schedule
    assert schedule.consumers.diff().tolist() == [1, 1, 1, 1, 0, 0]
