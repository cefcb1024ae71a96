"""Conformance of one packed call: it equals its sequences run apart, and refuses what breaks the contract.

Nothing here knows what a backend computes. The other half of the suite is test_conformance_trees.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.backends.linear.calls import packed_call
from tests.parity.subject import CHUNKS, HEAD_DIMS, HEADS, Leaves, Run, Subject, cut, run

FEW = 4.0
"""Allowed ratio of errors: a call of a few rows has too few numbers for closer statistics."""


def boundaries(lengths: list[int], chunk: int) -> list[tuple[int, int]]:
    """Every state that may be requested, some twice, in no order."""
    found = [(i, offset) for i, n in enumerate(lengths) for offset in [*range(0, n + 1, chunk), n]]
    return [*found[::2], *found[1::2]]


@pytest.mark.parametrize("kind", ["one token", "single tokens", "around a boundary", "many chunks"])
def test_outputs_states_and_gradients_are_those_of_each_sequence_alone(subject: Subject, kind: str) -> None:
    chunk = subject.need.chunk_size
    lengths = {
        "one token": [1],
        "single tokens": [1, 1, 1],
        "around a boundary": [chunk - 1, chunk, chunk + 1],
        "many chunks": [2 * chunk + 3, 1, 3 * chunk, chunk - 1, 5],
    }[kind]
    rows, initial = subject.leaves(sum(lengths)), subject.states(len(lengths))
    leaves, states = {**rows, "initial_state": initial}, boundaries(lengths, chunk)
    found = run(leaves, *subject.call(rows, initial, lengths, states))
    plain = run(leaves, *subject.uncut(rows, initial, lengths, states))
    exact = run(leaves, *subject.exact().apart(rows, initial, lengths, states))
    subject.check([found], [plain], [exact], FEW)


def test_a_state_after_no_token_is_the_initial_state(subject: Subject) -> None:
    initial = subject.states(2)
    _, states = subject.call(subject.leaves(9), initial, [4, 5], [(1, 0), (0, 0), (1, 0)])
    assert torch.equal(states, initial[[1, 0, 1]])


def test_no_requested_state_is_an_empty_tensor_and_changes_no_output(subject: Subject) -> None:
    rows, initial = subject.leaves(20), subject.states(2)
    output, states = subject.call(rows, initial, [13, 7])
    assert len(states) == 0
    exact = run(rows, subject.exact().apart(rows, initial, [13, 7])[0])
    subject.check([run(rows, output)], [run(rows, subject.uncut(rows, initial, [13, 7])[0])], [exact], FEW)


def consumed(subject: Subject, rows: Leaves, initial: torch.Tensor, uninterrupted: bool) -> Run:
    """A producer whose states start other sequences: one consumer, several, and one from its very end."""
    chunk = subject.need.chunk_size
    produced, lengths = 3 * chunk, [chunk + 3, 5, 1, 2 * chunk]
    sources = [chunk, 2 * chunk, chunk, produced]
    bounds = [produced, *itertools.accumulate(lengths, initial=produced)][1:]
    leaves = {**rows, "initial_state": initial}
    if uninterrupted:
        outputs = []
        for offset, begin, length in zip(sources, bounds, lengths, strict=False):
            joined = {name: torch.cat([x[:offset], x[begin : begin + length]]) for name, x in rows.items()}
            outputs.append(subject.call(joined, initial, [offset + length])[0][offset:])
        return run(leaves, torch.cat(outputs))
    _, states = subject.call(cut(rows, 0, produced), initial, [produced], [(0, 2 * chunk), (0, produced), (0, chunk)])
    started = subject.call(cut(rows, produced, bounds[-1]), states[[2, 0, 2, 1]], lengths)
    return run(leaves, started[0])


def test_gradients_reach_the_producer_through_states_of_one_and_several_consumers(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    rows, initial = subject.leaves(6 * chunk + 9), subject.states(1)
    found, plain = (consumed(subject, rows, initial, uninterrupted) for uninterrupted in (False, True))
    subject.check([found], [plain], [consumed(subject.exact(), rows, initial, True)], FEW)


def test_sequences_of_a_call_do_not_touch(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    lengths = [chunk + 5, 2 * chunk, 3]
    rows, initial = subject.leaves(sum(lengths)), subject.states(3)
    begin, end = lengths[0], lengths[0] + lengths[1]
    output, states = subject.call(rows, initial, lengths, [(0, chunk), (1, chunk), (2, 3)])
    leaves = {**rows, "initial_state": initial}
    found = torch.autograd.grad(output[begin:end].sum() + states[1].sum(), list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        outside = [gradient[:1], gradient[2:]] if name == "initial_state" else [gradient[:begin], gradient[end:]]
        assert not torch.cat(outside).any(), f"another sequence's {name} has a gradient"


def test_a_call_run_twice_is_equal_in_every_bit(subject: Subject) -> None:
    lengths = [2 * subject.need.chunk_size + 3, 7]
    rows, initial = subject.leaves(sum(lengths)), subject.states(2)
    leaves = {**rows, "initial_state": initial}
    first, second = (run(leaves, *subject.call(rows, initial, lengths, [(0, 0), (1, 7)])) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.values, second.values, strict=True))
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in leaves)


FAULTS = {
    "no sequence": ([0], []),
    "an empty sequence": ([0, 9, 9, 20], []),
    "a sequence that ends before its start": ([0, 12, 9, 20], []),
    "rows after the last sequence": ([0, 9, 19], []),
    "rows before the first sequence": ([1, 9, 20], []),
    "fewer rows than the sequences": ([0, 9, 21], []),
    "a state inside a chunk": ([0, 9, 20], [(1, 3)]),
    "a state after the end": ([0, 9, 20], [(0, 10)]),
    "a state of an unknown sequence": ([0, 9, 20], [(2, 0)]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_calls_that_break_the_contract_are_refused(subject: Subject, fault: str) -> None:
    bounds, states = FAULTS[fault]
    packed = packed_call(subject.need.chunk_size, bounds, states)
    initial = subject.states(len(bounds) - 1).to(subject.need.device, torch.float32)
    with pytest.raises(ValueError):
        subject.backend.call(subject.inputs(subject.leaves(20)), packed, initial)


def test_initial_states_of_another_count_shape_or_width_are_refused(subject: Subject) -> None:
    packed = packed_call(subject.need.chunk_size, [0, 9, 20])
    inputs, initial = subject.inputs(subject.leaves(20)), subject.states(2).to(subject.need.device, torch.float32)
    for wrong in (initial[:1], initial[:, :, :, :-1], initial[:, :, :-1], initial.bfloat16()):
        with pytest.raises(ValueError):
            subject.backend.call(inputs, packed, wrong)


def test_inputs_of_unequal_rows_are_refused(subject: Subject) -> None:
    packed = packed_call(subject.need.chunk_size, [0, 9, 20])
    inputs, initial = subject.inputs(subject.leaves(20)), subject.states(2).to(subject.need.device, torch.float32)
    for name, x in inputs.items():
        with pytest.raises(ValueError):
            subject.backend.call({**inputs, name: x[:-1]}, packed, initial)


def test_what_cannot_be_served_is_refused_with_reasons(subject: Subject) -> None:
    for wrong in ({"rule": "no rule"}, {"dtype": torch.int64}, {"linear_head_dims": (0, 0)}, {"chunk_size": 0}):
        reasons = subject.backend.why_not(replace(subject.need, **wrong))  # type: ignore[arg-type]
        assert reasons, wrong
        assert all(reason.strip() for reason in reasons), wrong


VARIATIONS = [
    *({"chunk_size": chunk} for chunk in (1, 12, *CHUNKS)),
    *({"linear_heads": heads} for heads in (*HEADS, (3, 3), (2, 3))),
    *({"linear_head_dims": dims} for dims in (*HEAD_DIMS, (1, 1), (16, 48), (100, 64), (256, 32))),
]


@pytest.mark.parametrize("change", VARIATIONS, ids=lambda change: " ".join(f"{k} {v}" for k, v in change.items()))
def test_what_is_not_refused_is_served(subject: Subject, change: dict[str, object]) -> None:
    need = replace(subject.need, **change)  # type: ignore[arg-type]
    reasons = subject.backend.why_not(need)
    if reasons:
        assert all(reason.strip() for reason in reasons)
        return
    asked = replace(subject, need=need)
    lengths = [need.chunk_size + 2, 1]
    rows, initial = asked.leaves(sum(lengths)), asked.states(2)
    states = boundaries(lengths, need.chunk_size)
    found, plain = (run(rows, *way(rows, initial, lengths, states)) for way in (asked.call, asked.uncut))
    asked.check([found], [plain], [run(rows, *asked.exact().apart(rows, initial, lengths, states))], FEW)
