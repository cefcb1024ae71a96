from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harts.backends.base import LinearAttention, Need
from harts.backends.linear.checks import check_call
from harts.registry import resolve
from tests.backends.linear.calls import naive, packed_call, random_call, recurrent

NEED = Need(
    device="cpu",
    dtype=torch.bfloat16,
    rule="kda",
    chunk_size=64,
    conv_width=4,
    linear_heads=(2, 4),
    linear_head_dims=(32, 32),
    full_heads=(4, 2),
    full_head_dims=(32, 32),
)
BACKENDS = pytest.mark.parametrize("backend", [naive(), recurrent()], ids=["naive", "recurrent"])


@BACKENDS
def test_an_ordinary_need_is_served(backend: LinearAttention) -> None:
    assert backend.why_not(NEED) == []


@BACKENDS
def test_every_reason_is_told(backend: LinearAttention) -> None:
    reasons = backend.why_not(
        replace(NEED, dtype=torch.int32, linear_heads=(3, 4), linear_head_dims=(0, 8), chunk_size=0, rule="rwkv")
    )
    assert reasons == [
        "the rule 'rwkv' is not one of kda, gdn",
        "the dtype torch.int32 is not a floating-point type",
        "4 value heads are not a multiple of 3 query heads",
        "the head dims (0, 8) are not positive",
        "the chunk size 0 is not positive",
    ]


def test_registered_names() -> None:
    assert resolve("linear_attention", "naive") is type(naive())
    assert resolve("linear_attention", "recurrent") is type(recurrent())


@BACKENDS
@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 20, 20, 29], r"sequence 1 has no rows \(20:20\)"),
        ([0, 20, 12, 29], "sequence 1 ends at 12, before its start 20"),
        ([0, 20, 24, 28], "runs from 0 to 28, the rows are 0 to 29"),
        ([1, 20, 24, 29], "starts at 1, not at 0"),
        ([0], "at least one sequence"),
    ],
)
def test_bad_sequences_are_refused(backend: LinearAttention, cu: list[int], message: str) -> None:
    call = replace(random_call([20, 4, 5], 8, "kda"), cu_seqlens=cu, states=[])
    with pytest.raises(ValueError, match=message):
        call.run(backend)


@BACKENDS
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((0, 12), "state 0 is after 12 tokens of sequence 0; .* chunk size 8 up to its length 20"),
        ((0, 24), "after 24 tokens of sequence 0"),
        ((2, 8), "of sequence 2, there are 2"),
    ],
)
def test_states_inside_chunks_are_refused(backend: LinearAttention, state: tuple[int, int], message: str) -> None:
    call = replace(random_call([20, 9], 8, "kda"), states=[state])
    with pytest.raises(ValueError, match=message):
        call.run(backend)


@BACKENDS
@pytest.mark.parametrize("name", ["q", "g", "beta"])
def test_rows_of_another_shape_are_refused(backend: LinearAttention, name: str) -> None:
    call = random_call([20], 8, "gdn")
    call = replace(call, rows={**call.rows, name: call.rows[name][:-1]})
    with pytest.raises(ValueError, match=f"{name}: has shape"):
        call.run(backend)


@BACKENDS
def test_an_initial_state_of_another_shape_is_refused(backend: LinearAttention) -> None:
    call = random_call([20], 8, "gdn")
    with pytest.raises(ValueError, match="initial_state: has shape"):
        replace(call, initial_state=call.initial_state.mT).run(backend)


def test_a_packed_call_is_checked_once_and_its_rows_every_time() -> None:
    call = random_call([20, 9], 8, "kda")
    packed = packed_call(8, call.cu_seqlens, call.states)
    naive().call(call.rows, packed, call.initial_state)
    packed.state_offset[0] = 3  # no longer looked at
    check_call(call.rows, packed, call.initial_state)
    with pytest.raises(ValueError, match="runs from 0 to 29, the rows are 0 to 28"):
        check_call({name: x[:-1] for name, x in call.rows.items()}, packed, call.initial_state)
    with pytest.raises(ValueError, match="initial_state: has shape"):
        check_call(call.rows, packed, call.initial_state[:1])


def test_what_a_call_derives_is_made_once_a_key_and_anew_for_a_copy() -> None:
    packed, made = packed_call(8, [0, 9]), []

    def make() -> int:
        made.append(0)
        return len(made)

    assert [packed.once(key, make) for key in ("a", "b", "a")] == [1, 2, 1]
    assert replace(packed, chunk_size=4).once("a", make) == 3

    def fail() -> int:
        raise ValueError

    with pytest.raises(ValueError):
        packed.once("c", fail)
    assert packed.once("c", make) == 4
