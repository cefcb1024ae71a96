"""Products with few outputs: rows have the bits that they have in any other packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harts.backends.model.invariant import BLOCK, linear

COUNTS = (1, 7, 100, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12_345)


def _draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype).requires_grad_()


def _with_gradients(function: Any, *given: Tensor | None) -> list[Tensor]:
    out = function(*given)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [each for each in given if each is not None], upstream)]


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (1, BLOCK + 3, 6), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_linear_product(shape: tuple[int, ...], biased: bool) -> None:
    given = (_draw(*shape), _draw(3, 6), _draw(3) if biased else None)
    for got, wanted in zip(_with_gradients(linear, *given), _with_gradients(functional.linear, *given), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight = _draw(5, 6).detach(), _draw(3, 6)
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("given", [torch.float32, torch.float64], ids=str)
def test_autocast_casts_as_it_does(given: torch.dtype) -> None:
    x, weight, bias = (_draw(*shape, dtype=given) for shape in ((5, 6), (3, 6), (3,)))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (_with_gradients(function, x, weight, bias) for function in (linear, functional.linear))
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_another_dtype_is_that_of_the_product_alone() -> None:
    x, weight, bias = (_draw(*shape, dtype=torch.bfloat16) for shape in ((5, 1, 6), (3, 6), (3,)))
    ours = _with_gradients(lambda *given: linear(*given, dtype=torch.float32), x, weight, bias)
    theirs = _with_gradients(lambda *given: functional.linear(*(each.float() for each in given)), x, weight, bias)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs] == [torch.float32] + [torch.bfloat16] * 3
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6 if got.dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("count", [5, BLOCK + 5])
def test_a_dtype_that_is_asked_for_holds_under_autocast(count: int) -> None:
    x, weight = _draw(count, 6, dtype=torch.float32), _draw(3, 6, dtype=torch.float32)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, dtype=torch.float32)

    wanted = _with_gradients(product, x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = _with_gradients(product, x, weight)
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, exact)


def test_two_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of torch.float64 and a weight of torch.float32"):
        linear(_draw(5, 6), _draw(3, 6, dtype=torch.float32))


def check_rows(inputs: int, outputs: int, dtype: torch.dtype, device: str) -> None:
    rows, weight = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        for shape in ((max(COUNTS), inputs), (outputs, inputs))
    )
    whole = linear(rows, weight)
    for count in COUNTS:
        assert torch.equal(linear(rows[:count], weight), whole[:count]), count
        assert torch.equal(linear(rows[-count:], weight), whole[-count:]), count


@pytest.mark.parametrize("outputs", [1, 16])
def test_rows_have_their_bits_in_any_number_of_rows(outputs: int) -> None:
    check_rows(96, outputs, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [
        (1536, 128, torch.float32),
        (1536, 512, torch.float32),
        (2048, 512, torch.float32),
        (2048, 512, torch.bfloat16),
        (2048, 1, torch.bfloat16),
    ],
    ids=str,
)
def test_rows_have_their_bits_on_a_gpu(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_rows(inputs, outputs, dtype, "cuda")
