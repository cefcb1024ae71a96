"""What a trainer holds on its host - tensors, arrays, numpy scalars - reads as the same numbers in lists."""

import re

import numpy as np
import pytest

from harts.errors import InputError
from harts.stages.ingest.records import rollout_batch
from tests.stages.ingest.files import record

LISTS = record("a", reward=1.0, old_logprobs=[0.0, -0.5, -2.0])


def digest(**fields) -> str:
    return rollout_batch([LISTS | fields], "test").digest()


def fault(**fields) -> str:
    with pytest.raises(InputError) as caught:
        rollout_batch([LISTS | fields], "test")
    return str(caught.value)


def test_bfloat16_and_grad_tensors_are_taken():
    torch = pytest.importorskip("torch")
    values = torch.tensor(LISTS["old_logprobs"])
    for tensor in (values.bfloat16(), values.half(), values.clone().requires_grad_()):
        assert digest(old_logprobs=tensor) == digest()
        assert digest(old_logprobs=list(tensor)) == digest()


def test_tensors_without_dimension_are_numbers():
    torch = pytest.importorskip("torch")
    for reward in (torch.tensor(1.0), torch.tensor(1), torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)):
        assert digest(reward=reward) == digest()
    assert digest(tokens=list(torch.tensor([1, 2, 3]))) == digest()
    assert digest(reward_known=torch.tensor(True), shared_length=torch.tensor(0)) == digest()


@pytest.mark.parametrize("reward", [np.float32(1), np.float16(1), np.longdouble(1), np.int8(1), np.array(1.0)])
def test_numpy_scalars_and_arrays_without_dimension_are_numbers(reward):
    assert digest(reward=reward) == digest()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_lists_of_numpy_integers_are_token_ids(kind):
    assert digest(tokens=[kind(1), 2, kind(3)]) == digest()
    assert digest(loss_mask=[kind(0), kind(1), True]) == digest()


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.longdouble, np.array])
def test_lists_of_numpy_floats_are_numbers(kind):
    assert digest(old_logprobs=[kind(each) for each in LISTS["old_logprobs"]]) == digest()


def test_numpy_booleans_are_a_mask_and_a_flag():
    assert digest(loss_mask=[np.False_, np.True_, np.array(True)], reward_known=np.array(True)) == digest()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", [1, np.True_, 3], "entry 1 is True, must be a token id"),
        ("tokens", [1, np.array(True), 3], "entry 1 is True, must be a token id"),
        ("tokens", [1, 2, np.float32(3)], "entry 2 is 3.0, must be a token id"),
        ("tokens", [1, np.array([2]), 3], r"entry 1 is array\(\[2\]\), must be a token id"),
        ("tokens", [1, np.uint64(2**63), 3], "entry 1 is 9223372036854775808, too large"),
        ("tokens", [1, np.int64(-2), 3], "entry 1 is -2, a token id must be from 0"),
        ("loss_mask", [0, np.float32(1), 1], "entry 1 is 1.0, must be 0, 1, true or false"),
        ("old_logprobs", [0.0, np.True_, -1.0], "entry 1 is True, must be a number"),
        ("reward", np.True_, r"is (np\.)?True_?, must be a number"),
        ("reward", np.array([1.0]), r"is array\(\[1\.\]\), must be a number"),
        ("reward", np.complex64(1), "must be a number"),
        ("shared_length", np.array(-1), r"is array\(-1\), must be an integer"),
        ("reward_known", np.int8(1), "must be true or false"),
    ],
)
def test_other_scalars_are_refused(field, value, words):
    assert re.search(rf"^test\[0\]: trajectory 'a': field {field}: .*{words}", fault(**{field: value}))


def test_tensors_that_numpy_cannot_hold_are_refused_by_name():
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(3, device="meta"), torch.zeros(3).to(torch.float8_e4m3fn), torch.zeros(3).to_sparse()):
        words = rf"is a Tensor of {tensor.dtype} that cannot be read as an array: "
        assert re.search(f"^test\\[0\\]: trajectory 'a': field old_logprobs: {words}", fault(old_logprobs=tensor))
    assert "field reward: is a Tensor of torch.float32 that cannot" in fault(reward=torch.zeros((), device="meta"))
    assert "field tokens: entry 1 is True" in fault(tokens=[1, torch.tensor(True), 3])
    assert "field reward: is tensor(True), must be a number" in fault(reward=torch.tensor(True))
    assert "field reward: is tensor([1.]), must be a number" in fault(reward=torch.ones(1))


def test_object_that_refuses_to_be_an_array_is_named():
    class Closed:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("closed")

    assert fault(tokens=Closed()).endswith("field tokens: is a Closed that cannot be read as an array: closed")
