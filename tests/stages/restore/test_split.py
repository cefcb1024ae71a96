"""The stage over several processes against plain evaluation in one: values, every gradient, and what is reduced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.stages.restore.labels import predictions
from harts.stages.restore.positions import own_positions
from tests.stages.restore.plain import plain
from tests.stages.restore.processes import (
    BLOCK,
    WIDTH,
    WORLD,
    Case,
    inputs,
    loss_of,
    microbatch,
    restore_everywhere,
    shard_of,
)

SPLITS = {
    "vocabulary over 2": Case(2, 1, 21),
    "vocabulary over 4": Case(4, 1, 11),
    "positions over 2": Case(1, 2, 41),
    "positions over 4": Case(1, 4, 41),
    "both over 2": Case(2, 2, 32),
}
VARIED: dict[str, dict[str, Any]] = {
    "all": {},
    "float32": {"dtype": torch.float32},
    "log-probs alone": {"entropy": False},
    "some have a gradient": {"mask": "some"},
    "trained": {"restored": "trained", "mask": "some"},
    "untrained": {"restored": "trained", "mask": "none"},
    "none has a gradient": {"mask": "none"},
    "fewer rows than processes": {"paths": "pair"},
}
COMPARED = {f"{name}, {how}": case._replace(**each) for name, case in SPLITS.items() for how, each in VARIED.items()}
COMPARED |= {
    "vocabulary over 4, the last has no rows": Case(4, 1, 14),
    "vocabulary over 2, the first has all rows": Case(2, 1, 41),
    "both over 2, the first has all rows": Case(2, 2, 41),
}
WIDE = [Case(4, 1, 500, vocabulary=2000), Case(2, 2, 1000, vocabulary=2000)]
LARGE = SPLITS["both over 2"]._replace(dtype=torch.float32, shift=100_000)
OUTSIDE = [case._replace(outside=True) for case in SPLITS.values()]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Any]]:
    return restore_everywhere(tmp_path_factory.mktemp("processes"), [*COMPARED.values(), *WIDE, LARGE, *OUTSIDE])


def whole_gradients(case: Case, got: list[Any]) -> tuple[Tensor, Tensor]:
    """Of hidden states and of the whole LM head, as a model sums and lays out those of its processes."""
    parts = got[: case.head * case.positions]
    heads = [parts[i :: case.head] for i in range(case.head)]
    return sum(each.d_hidden for each in parts), torch.cat([sum(each.d_head for each in same) for same in heads])


@pytest.mark.parametrize("name", COMPARED)
def test_values_and_gradients_are_those_of_plain_evaluation(name: str, found: dict[Case, list[Any]]) -> None:
    case = COMPARED[name]
    layout = microbatch(case)
    columns = layout.plan.tree.columns
    hidden, weight = (each.double().requires_grad_() for each in inputs(case, layout))
    values = plain(hidden, weight, predictions(layout, case.vocabulary))
    want = torch.autograd.grad(loss_of(values[0], values[1] if case.entropy else None, layout), (hidden, weight))
    trained = torch.from_numpy(columns.loss_mask[columns.predicted()])
    shown = trained if case.restored == "trained" else torch.ones_like(trained)
    near = {"rtol": 1e-12, "atol": 1e-12} if case.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for got in found[case]:
        assert (got.entropy is None) == (not case.entropy)
        for mine, theirs in zip((got.logprobs, got.entropy), values, strict=True):
            if mine is not None:
                assert mine.dtype == case.dtype
                assert mine[~shown].isnan().all()
                torch.testing.assert_close(mine[shown].double(), theirs[shown], **near)
    for mine, theirs in zip(whole_gradients(case, found[case]), want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **near)


def test_what_is_compared_has_what_is_hard() -> None:
    """A row with targets on both shards, a row with two temperatures, shards of other sizes, rows without a label."""
    case = SPLITS["vocabulary over 2"]
    layout = microbatch(case)
    row, target, scale = predictions(layout, case.vocabulary)
    assert scale is not None
    of_rows = [row == each for each in np.unique(row)]
    assert any(len(set(target[mine] < case.shard)) == 2 for mine in of_rows)
    assert any(len(set(scale[mine])) == 2 for mine in of_rows)
    assert 3 * WORLD < len(of_rows) < layout.rows
    assert [shard_of(SPLITS["vocabulary over 4"], place)[1] for place in range(4)] == [11, 11, 11, 8]
    assert [shard_of(COMPARED["vocabulary over 4, the last has no rows"], place)[1] for place in range(4)][3] == 0


def test_large_logits_lose_no_digits(found: dict[Case, list[Any]]) -> None:
    """They are exact in float32; the log of a sum of exponentials of such numbers is not."""
    layout = microbatch(LARGE)
    hidden, weight = (each.double() for each in inputs(LARGE, layout))
    values = plain(hidden, weight, predictions(layout, LARGE.vocabulary))
    for got in found[LARGE]:
        for mine, theirs in zip((got.logprobs, got.entropy), values, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", COMPARED)
def test_all_processes_get_equal_bits(name: str, found: dict[Case, list[Any]]) -> None:
    first, *others = found[COMPARED[name]]
    for other in others:
        assert other.logprobs.numpy().tobytes() == first.logprobs.numpy().tobytes()
        if first.entropy is not None:
            assert other.entropy.numpy().tobytes() == first.entropy.numpy().tobytes()


@pytest.mark.parametrize("name", COMPARED)
def test_few_numbers_a_position_are_reduced_in_forward_and_nothing_in_backward(
    name: str, found: dict[Case, list[Any]]
) -> None:
    """A maximum and a sum for a vocabulary that is split, one sum for positions; however many blocks there are."""
    case = COMPARED[name]
    columns = microbatch(case).plan.tree.columns
    wanted = columns.loss_mask[columns.predicted()].sum() if case.restored == "trained" else len(columns.predicted())
    for got in found[case]:
        assert len(got.forward) == 2 * (case.head > 1) + (case.positions > 1)
        assert max(got.forward) <= (2 + case.entropy) * wanted
        assert got.backward == []


@pytest.mark.parametrize("case", WIDE, ids=["vocabulary", "both"])
def test_nothing_of_the_size_of_rows_times_vocabulary_exists_or_is_reduced(
    case: Case, found: dict[Case, list[Any]]
) -> None:
    layout = microbatch(case)
    positions = len(layout.plan.tree.columns.predicted())
    allowed = max(BLOCK, WIDTH) * case.shard
    assert positions * 3 < allowed < layout.rows * case.shard / 5
    for got in found[case]:
        assert case.shard * BLOCK <= got.largest <= allowed
        assert max(got.forward) <= 3 * positions


@pytest.mark.parametrize("case", OUTSIDE, ids=list(SPLITS))
def test_a_target_outside_the_vocabulary_is_an_error_everywhere_before_any_collective(
    case: Case, found: dict[Case, list[Any]]
) -> None:
    for message, collectives in found[case]:
        assert "id 41 is outside the model's vocabulary of 41" in message
        assert collectives == []


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_shares_of_positions_are_contiguous_rows_of_equal_count(processes: int) -> None:
    row = np.array([9, 2, 2, 5, 30, 9, 2, 7, 5], dtype=np.int64)
    shares = [own_positions(row, process, processes) for process in range(processes)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(row)))
    assert all((np.diff(share) > 0).all() for share in shares)
    rows = [np.unique(row[share]).tolist() for share in shares]
    assert np.concatenate(rows).tolist() == [2, 5, 7, 9, 30]
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_no_position_at_all_is_shared_out() -> None:
    assert len(own_positions(np.zeros(0, dtype=np.int64), 1, 2)) == 0
