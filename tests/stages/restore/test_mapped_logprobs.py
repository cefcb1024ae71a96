"""The hand-written forward and backward against plain log_softmax of every position, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.stages.restore import mapped_logprobs as module
from harts.stages.restore.labels import Predictions
from harts.stages.restore.mapped_logprobs import mapped_logprobs
from harts.stages.restore.products import product
from tests.stages.restore.plain import Largest, plain

ROWS, WIDTH, VOCABULARY = 11, 5, 13


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight


def wanted(temperatures: str, count: int = 40) -> Predictions:
    """Rows 3 and 10 predict nothing; rows repeat with equal and with other targets and temperatures."""
    rng = np.random.default_rng(1)
    row = rng.choice([0, 1, 2, 4, 5, 6, 7, 8, 9], size=count)
    target = rng.integers(0, 4, size=count)
    scale = {"none": None, "one": np.full(count, 1 / 0.6), "many": rng.choice([1.0, 1 / 0.6, 0.5], size=count)}
    return Predictions(row, target, scale[temperatures])


@pytest.mark.parametrize("rows_per_block", [1, 3, 1000])
@pytest.mark.parametrize("temperatures", ["none", "one", "many"])
def test_values_and_gradients_are_those_of_log_softmax(rows_per_block: int, temperatures: str) -> None:
    hidden, weight = inputs()
    positions = wanted(temperatures)
    factors = torch.randn(2, len(positions.row), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got = mapped_logprobs(hidden, weight, positions, rows_per_block=rows_per_block, entropy=True)
    want = plain(hidden, weight, positions)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
    mine = torch.autograd.grad((got[0] * factors[0] + got[1] * factors[1]).sum(), (hidden, weight))
    theirs = torch.autograd.grad((want[0] * factors[0] + want[1] * factors[1]).sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not mine[0][[3, 10]].any()


@pytest.mark.parametrize("temperatures", ["none", "many"])
def test_rows_without_a_gradient_do_not_change_those_of_others(temperatures: str) -> None:
    hidden, weight = inputs()
    positions = wanted(temperatures)
    live = torch.from_numpy(np.isin(positions.row, (1, 4, 8)))
    got = mapped_logprobs(hidden, weight, positions, rows_per_block=2, entropy=True)
    want = plain(hidden, weight, positions)
    mine = torch.autograd.grad(sum(each[live].sin().sum() for each in got), (hidden, weight))
    theirs = torch.autograd.grad(sum(each[live].sin().sum() for each in want), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1])
def test_each_output_alone_has_the_right_gradient(which: int) -> None:
    hidden, weight = inputs()
    positions = wanted("many", 12)

    def one(hidden: Tensor, weight: Tensor) -> Tensor:
        out = mapped_logprobs(hidden, weight, positions, rows_per_block=2, entropy=True)[which]
        assert out is not None
        return out

    assert torch.autograd.gradcheck(one, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    found = []
    for enabled in (False, True):
        hidden, weight = inputs(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logprobs, entropy = mapped_logprobs(hidden, weight, wanted("many"), rows_per_block=3, entropy=True)
            assert entropy is not None
            (logprobs.sin().sum() + entropy.sin().sum()).backward()
        found.append((logprobs, entropy, hidden.grad, weight.grad))
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None and theirs is not None
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_two_temperatures_on_one_row_are_both_right() -> None:
    hidden, weight = inputs()
    positions = Predictions(np.array([4, 4, 4]), np.array([7, 7, 2]), np.array([1.0, 2.0, 2.0]))
    got, _ = mapped_logprobs(hidden, weight, positions, rows_per_block=1)
    logits = hidden[4] @ weight.T
    want = torch.stack([logits.log_softmax(0)[7], (logits * 2).log_softmax(0)[7], (logits * 2).log_softmax(0)[2]])
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_hidden_states_that_predict_nothing_may_hold_anything() -> None:
    hidden, weight = inputs()
    with torch.no_grad():
        hidden[3], hidden[10] = float("nan"), float("inf")
    got, _ = mapped_logprobs(hidden, weight, wanted("none"), rows_per_block=4)
    grads = torch.autograd.grad(got.sum(), (hidden, weight))
    assert all(torch.isfinite(each).all() for each in (got, *grads))


def test_no_prediction_at_all_gives_zero_gradients() -> None:
    hidden, weight = inputs()
    none = Predictions(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), None)
    got, entropy = mapped_logprobs(hidden, weight, none, rows_per_block=4, entropy=True)
    assert entropy is not None and got.shape == entropy.shape == (0,)
    (got.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def test_bfloat16_is_accumulated_in_float32() -> None:
    hidden, weight = inputs(torch.bfloat16)
    got, _ = mapped_logprobs(hidden, weight, wanted("none"), rows_per_block=4)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, plain(hidden.float(), weight.float(), wanted("none"))[0], rtol=1e-6, atol=1e-6)
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_memory_is_a_block_of_logits_in_both_directions() -> None:
    rows, width, vocabulary, block, count = 60, 4, 50, 5, 900
    rng = np.random.default_rng(0)
    positions = Predictions(
        rng.integers(0, rows, count), rng.integers(0, vocabulary, count), rng.choice([1.0, 2.0], count)
    )
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Largest() as seen:
        logprobs, entropy = mapped_logprobs(hidden, weight, positions, rows_per_block=block, entropy=True)
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    assert saved and max(saved) <= max(rows, vocabulary) * width
    assert seen.elements <= max(block * vocabulary, count)


def test_rows_are_multiplied_once_however_often_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        multiplied.append(len(a))
        return product(a, b)

    monkeypatch.setattr(module, "product", counted)
    hidden, weight = inputs()
    positions = wanted("many")
    logprobs, _ = mapped_logprobs(hidden, weight, positions, rows_per_block=4, entropy=True)
    assert multiplied == [4, 4, 1]
    multiplied.clear()
    logprobs[torch.from_numpy(np.isin(positions.row, (0, 6)))].sum().backward()
    vocabulary = len(weight)
    assert multiplied == [2, 2, vocabulary], "logits and gradients of hidden of the two rows that have one; of the head"


def test_results_do_not_depend_on_the_order_of_positions_bit_for_bit() -> None:
    hidden, weight = inputs(torch.float32)
    row, target, scale = wanted("many")
    assert scale is not None
    mixed = np.random.default_rng(5).permutation(len(row))
    a, _ = mapped_logprobs(hidden, weight, Predictions(row, target, scale), rows_per_block=4)
    other = Predictions(row[mixed], target[mixed], scale[mixed])
    b, _ = mapped_logprobs(hidden, weight, other, rows_per_block=4)
    assert torch.equal(a[torch.from_numpy(mixed)], b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_multiplies_16_bit_numbers_and_sums_in_float32(dtype: torch.dtype) -> None:
    """Log-probs as of float32 products of the same numbers; gradients within the rounding of those of logits."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=draw).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(1000, 64, generator=draw) / 8).to("cuda", dtype).requires_grad_()
    rng = np.random.default_rng(1)
    positions = Predictions(rng.integers(0, 300, 900), rng.integers(0, 1000, 900), None)
    up = torch.randn(900, generator=draw).cuda()
    found, _ = mapped_logprobs(hidden, weight, positions, rows_per_block=128)
    assert found.dtype == torch.float32
    got = torch.autograd.grad(found, (hidden, weight), up)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    plain = (exact[0] @ exact[1].T).log_softmax(1)[torch.from_numpy(positions.row), torch.from_numpy(positions.target)]
    torch.testing.assert_close(found.double(), plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, torch.autograd.grad(plain, exact, up.double()), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 6 * torch.finfo(dtype).eps
