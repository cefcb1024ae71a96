"""How a model may be split over processes, and which part of every parameter each has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harts.backends.model.megatron.parallel import ParallelConfig, parallel_faults
from tests.backends.model.megatron.runs import BIASED, GQA, MLA, MOE, config

FITS: dict[str, Any] = {
    "linear_heads": 4,
    "linear_value_heads": 4,
    "linear_key_dim": 4,
    "intermediate_size": 20,
    "moe": {**BIASED, "experts": 4},
}
GQA4 = {**GQA, "heads": 4, "kv_heads": 4}
MLA4 = {**MLA, "heads": 4, "q_rank": 4, "kv_rank": 4, "rope_dim": 4}


@pytest.mark.parametrize(
    ("changes", "sizes", "processes", "wanted"),
    [
        ({}, {}, 1, []),
        ({}, {"tensor": 2, "context": 2, "pipeline": 2, "expert": 4}, 8, []),
        (
            {},
            {"tensor": 3},
            4,
            ["tensor 3 x context 1 x pipeline 1 is 3", "linear_heads is 4, no multiple of tensor 3"],
        ),
        ({}, {"pipeline": 3}, 3, ["layers is 4, no multiple of pipeline 3"]),
        ({}, {"expert": 3}, 3, ["moe.experts is 4, no multiple of expert 3"]),
        ({}, {"expert": 4}, 2, ["expert is 4, no divisor of the 2 of a stage"]),
        ({"moe": None}, {"expert": 2}, 2, ["expert is 2, but the model has no experts"]),
        ({"linear_heads": 2}, {"context": 4}, 4, ["linear_heads is 2, no multiple of tensor 1 x context 4"]),
        ({"kv_heads": 2}, {"context": 4}, 4, ["kv_heads is 2, no multiple of tensor 1 x context 4"]),
        ({"intermediate_size": 21}, {"tensor": 2}, 2, ["intermediate_size is 21, no multiple of tensor 2"]),
        ({}, {"tensor": 2, "sequence": False}, 2, ["sequence is false: experts beside tensor parallelism need it"]),
        ({**MLA4, "moe": None}, {"tensor": 2, "sequence": False}, 2, ["gradients of shared keys are lost"]),
    ],
)
def test_sizes_that_do_not_fit_are_all_named(
    changes: dict[str, Any], sizes: dict[str, Any], processes: int, wanted: list[str]
) -> None:
    found = parallel_faults(config(**{**FITS, **GQA4, **changes, "parallel": sizes}), processes)
    for text in wanted:
        assert any(text in fault for fault in found), (text, found)
    assert bool(found) == bool(wanted)


def test_rows_are_split_between_the_layers_too() -> None:
    assert ParallelConfig(tensor=2, context=3).row_multiple == 6
    assert ParallelConfig(tensor=2, context=3, sequence=False).row_multiple == 3


def test_parts_are_cut_and_joined() -> None:
    from harts.backends.model.megatron.parts import Part, joined

    draw = torch.Generator().manual_seed(0)
    wholes = {
        "rows": (torch.randn(8, 3, generator=draw), 0, 4, 1),
        "columns": (torch.randn(3, 6, generator=draw), 1, 2, 1),
        "vocabulary": (torch.randn(5, 3, generator=draw), 0, 4, 1),
        "gate and up": (torch.randn(8, 3, generator=draw), 0, 2, 2),
        "alike": (torch.randn(3, generator=draw), None, 1, 1),
    }
    pairs = []
    for name, (whole, dim, count, blocks) in wholes.items():
        for index in range(count):
            part = Part(name, tuple(whole.shape), dim, index, count, blocks, True, 0, 2)
            pairs.append((part, part.cut(whole)))
            copy = Part(name, tuple(whole.shape), dim, index, count, blocks, True, 1, 2)
            pairs.append((copy, torch.full_like(part.cut(whole), torch.nan)))  # of another replica
    found = joined(pairs)
    assert set(found) == set(wholes)
    assert all(torch.equal(found[name], whole) for name, (whole, *_) in wholes.items())
    gates = [part for part in pairs if part[0].name == "gate and up" and part[0].leads]
    whole = wholes["gate and up"][0]
    assert torch.equal(gates[1][1], torch.cat([whole[2:4], whole[6:8]]))
    with pytest.raises(ValueError, match=r"rows: has parts \[0, 1, 3\] of 4"):
        joined(pair for pair in pairs if (pair[0].name, pair[0].index) != ("rows", 2))


@pytest.mark.parametrize("moe", [None, MOE])
def test_weights_depend_on_the_seed_and_their_names_alone(moe: dict[str, Any] | None) -> None:
    from harts.backends.model.megatron.initial import initialise
    from harts.backends.model.megatron.parts import parts_of
    from harts.backends.model.megatron.run import built

    made = config(moe=moe)
    model = built(made, "cpu")
    first = {name: each.detach().clone() for name, each in model.module.named_parameters()}
    shuffled = sorted(parts_of(model.module, made, model.groups), key=lambda pair: pair[0].name, reverse=True)
    initialise(shuffled, made)
    again = dict(model.module.named_parameters())
    assert all(torch.equal(each, again[name]) for name, each in first.items())
    drawn = [each for each in first.values() if each.dim() > 1]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
