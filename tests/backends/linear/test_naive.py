from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harts.backends.base import LinearAttention
from tests.backends.linear.calls import HV, RULES, Call, error, naive, random_call, recurrent, weighted_sum, worst


def assert_same(call: Call, exact: float = 1e-12) -> None:
    found, wanted = call.run(naive()), call.run(recurrent())
    assert error(found.output, wanted.output) < exact
    assert error(found.states, wanted.states) < exact
    assert worst(call.gradients(weighted_sum(found)), call.gradients(weighted_sum(wanted))) < exact


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [1, 4, 8, 12, 16])
def test_equals_the_token_recurrence(rule: str, chunk: int) -> None:
    assert_same(random_call([37, 1, 20, 16], chunk, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_lengths_around_chunk_boundaries(rule: str, length: int) -> None:
    assert_same(random_call([length], 8, rule, seed=length))


@pytest.mark.parametrize("rule", RULES)
def test_long_and_short_sequences_in_any_order(rule: str) -> None:
    assert_same(random_call([3, 33, 8, 1, 40, 33], 8, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", [0.0, -5.0, -20.0, -1000.0])
def test_extreme_gates(rule: str, gate: float) -> None:
    call = random_call([40, 19], 16, rule)
    assert_same(replace(call, rows={**call.rows, "g": torch.full_like(call.rows["g"], gate).requires_grad_()}))


@pytest.mark.parametrize("rule", RULES)
def test_gates_of_all_sizes_side_by_side_lose_no_digits(rule: str) -> None:
    call = random_call([64, 50], 16, rule)
    sizes = torch.tensor([0.0, -0.1, -20.0, -1000.0], dtype=torch.float64)
    pick = torch.randint(0, 4, call.rows["g"].shape, generator=torch.Generator().manual_seed(0))
    assert_same(replace(call, rows={**call.rows, "g": sizes[pick].requires_grad_()}))


def test_gradients_of_strong_gates_keep_their_relative_accuracy_in_float32() -> None:
    call = random_call([40], 16, "kda")
    call = replace(call, rows={**call.rows, "g": torch.full_like(call.rows["g"], -20.0).requires_grad_()})
    wanted = call.gradients(weighted_sum(call.run(recurrent())))["g"]
    narrow = {name: x.detach().float().requires_grad_() for name, x in call.rows.items()}
    narrow_call = replace(call, rows=narrow, initial_state=call.initial_state.detach().float().requires_grad_())
    found = narrow_call.gradients(weighted_sum(narrow_call.run(naive())))["g"]
    assert error(found.double(), wanted) < 1e-6


@pytest.mark.parametrize("backend", [naive(), recurrent()], ids=["naive", "recurrent"])
@pytest.mark.parametrize("rule", RULES)
def test_resuming_from_a_returned_state_is_the_uninterrupted_run(backend: LinearAttention, rule: str) -> None:
    whole = random_call([29], 8, rule)
    wanted = whole.run(backend)
    loss = weighted_sum([wanted.output])
    head = replace(whole, cu_seqlens=[0, 16], rows={n: x[:16] for n, x in whole.rows.items()}, states=[(0, 16)])
    first = head.run(backend)
    tail = {n: x[16:] for n, x in whole.rows.items()}
    second = replace(whole, cu_seqlens=[0, 13], rows=tail, initial_state=first.states, states=[]).run(backend)
    found = torch.cat([first.output, second.output])
    assert error(found, wanted.output) < 1e-14
    assert worst(whole.gradients(weighted_sum([found])), whole.gradients(loss)) < 1e-13


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_several_consumers_of_a_state_sum(rule: str) -> None:
    call = random_call([20], 8, rule)
    call = replace(call, states=[(0, 16), (0, 8), (0, 16)])

    def losses(backend: LinearAttention) -> list[torch.Tensor]:
        states = call.run(backend).states
        children = random_call([5, 9, 12], 8, rule, seed=3)
        started = replace(children, initial_state=states[[0, 1, 0]]).run(backend)
        return [weighted_sum(started), weighted_sum([states])]

    together = call.gradients(torch.stack(losses(naive())).sum())
    assert worst(together, call.gradients(torch.stack(losses(recurrent())).sum())) < 1e-12
    apart = [call.gradients(loss) for loss in losses(naive())]
    assert worst(together, {name: apart[0][name] + apart[1][name] for name in together}) < 1e-13


@pytest.mark.parametrize("backend", [naive(), recurrent()], ids=["naive", "recurrent"])
def test_a_detached_state_is_noticed(backend: LinearAttention) -> None:
    call = random_call([20], 8, "kda")
    output, states = call.run(backend)
    wanted = call.gradients(weighted_sum([output, states]))
    assert worst(call.gradients(weighted_sum([output, states.detach()])), wanted) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_other_sequences_keep_every_bit(rule: str, name: str) -> None:
    call = random_call([21, 18, 40], 8, rule, dtype=torch.float32)
    before = call.run(naive())
    after = call.with_row(name, 21, 39, -0.37).run(naive())
    inside = slice(21, 39)
    assert not torch.equal(before.output[inside], after.output[inside])
    for part in (slice(0, 21), slice(39, 79)):
        assert torch.equal(before.output[part], after.output[part])
    others = [i for i, (sequence, _) in enumerate(call.states) if sequence != 1]
    assert torch.equal(before.states[others], after.states[others])


@pytest.mark.parametrize("rule", RULES)
def test_later_tokens_change_no_bit_of_earlier_ones(rule: str) -> None:
    call = random_call([40], 16, rule, dtype=torch.float32)
    before, after = call.run(naive()), call.with_row("k", 21, 40, 0.2).run(naive())
    assert torch.equal(before.output[:21], after.output[:21])
    assert not torch.equal(before.output[21:], after.output[21:])


@pytest.mark.parametrize("backend", [naive(), recurrent()], ids=["naive", "recurrent"])
def test_narrow_inputs_give_narrow_outputs_and_float32_states(backend: LinearAttention) -> None:
    call = random_call([20, 9], 8, "kda", dtype=torch.bfloat16)
    found = call.run(backend)
    assert (found.output.dtype, found.states.dtype) == (torch.bfloat16, torch.float32)
    wide = replace(call, rows={name: x.detach().double() for name, x in call.rows.items()})
    assert error(found.states.double(), wide.run(recurrent()).states) < 1e-6
    assert call.gradients(weighted_sum(found))["k"].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", [naive(), recurrent()], ids=["naive", "recurrent"])
def test_no_requested_state(backend: LinearAttention) -> None:
    call = replace(random_call([9, 3], 8, "gdn"), states=[])
    assert call.run(backend).states.shape == (0, *call.initial_state.shape[1:])


@pytest.mark.parametrize("rule", RULES)
def test_no_pairwise_decay_is_kept_for_backward(rule: str) -> None:
    call = random_call([256], 64, rule)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        call.run(naive())
    chunks = 4 * HV
    assert 0 < max(kept) <= chunks * 64 * 64
