"""A diff finds every changed field of every kind, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from harts.ir import PerMicrobatch, Value
from harts.ir.base import array_fields
from harts.ir.diff import Difference, diff, format_diff
from tests.ir import cases

KINDS = cases.every_kind()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_no_difference(kind: str) -> None:
    assert diff(KINDS[kind], cases.every_kind()[kind]) == []
    assert diff(KINDS[kind], KINDS[kind], tolerance=0.0) == []


def names_of(value: Value) -> list[str]:
    """Fields that are arrays or tensors."""
    return [field.name for field in fields(value) if isinstance(getattr(value, field.name), np.ndarray)]


def changed(item: Any) -> Any:
    """Another item of the same type, that differs in one place."""
    if isinstance(item, np.ndarray):
        other = item.copy()
        flat = other.reshape(-1)
        flat[-1] = ~flat[-1] if item.dtype == np.bool_ else flat[-1] + 1
        return other
    if isinstance(item, tuple):
        return (*item[:-1], changed(item[-1]))
    if isinstance(item, Value):
        name = next(name for name in reversed(names_of(item)) if np.size(getattr(item, name)) > 1)
        return replace(item, **{name: changed(getattr(item, name))})
    return item + "x" if isinstance(item, str) else item + 1


def single_changes() -> Iterator[Any]:
    for kind, value in KINDS.items():
        for field in fields(value):
            if getattr(value, field.name) is not None:
                yield pytest.param(value, field.name, id=f"{kind}.{field.name}")


@pytest.mark.parametrize(("value", "name"), list(single_changes()))
def test_every_changed_field_is_found_alone(value: Value, name: str) -> None:
    other = replace(value, **{name: changed(getattr(value, name))})
    (found,) = diff(value, other)
    (back,) = diff(other, value)
    assert found.path.startswith(f"{value.kind}.{name}")
    assert found.entries == 1
    assert (found.left, found.right) == (back.right, back.left)
    assert found.left != found.right
    assert value.digest() != other.digest()


@pytest.mark.parametrize("name", [spec.name for spec in array_fields(type(KINDS["columns"])) if spec.optional])
def test_a_column_that_only_one_has_is_found(name: str) -> None:
    value = cases.trie().batch.columns
    size = 223 if name.endswith("s") else 3
    without, having = replace(value, **{name: None}), replace(value, **{name: np.zeros(size)})
    assert diff(without, having) == [Difference(f"columns.{name}", "absent", f"float64[{size}]")]


def test_path_goes_through_all_that_is_held() -> None:
    plan, other = cases.plan(), cases.plan()
    tree = replace(other.tree, parent=changed(other.tree.parent))
    left = PerMicrobatch(cases.step(), (plan, plan))
    right = PerMicrobatch(cases.step(), (plan, replace(other, tree=tree)))
    assert diff(left, right) == [Difference("per_microbatch.items[1].tree.parent[4]", "0", "1", 1, 5)]
    assert format_diff(diff(left, right)) == "per_microbatch.items[1].tree.parent[4]: 0 != 1 (1 of 5 entries differ)"


def test_arrays_tell_first_index_and_count() -> None:
    value = cases.partitions()
    other = replace(value, microbatch=np.array([[0, 1, 0], [0, 1, 1]], dtype=np.int32))
    assert diff(value, other) == [Difference("partitions.microbatch[0, 1]", "0", "1", 2, 6)]


def test_shapes_and_dtypes_are_told() -> None:
    value = cases.outputs()
    other = replace(value, hidden=np.zeros((96, 5)), router_z=np.zeros(1, np.float32))
    assert [str(each) for each in diff(value, other)] == [
        "compact_outputs.hidden: float32[96, 4] != float64[96, 5]",
        "compact_outputs.router_z: float32[] != float32[1]",
    ]


def test_all_differences_are_listed_in_field_order() -> None:
    value = cases.step()
    other = replace(value, source="b", replicas=3, candidates=("x", "y", "z"), chosen=0)
    assert [each.path for each in diff(value, other)] == [
        "step_plan.source",
        "step_plan.replicas",
        "step_plan.candidates",
        "step_plan.candidates[0]",
        "step_plan.chosen",
    ]
    assert str(diff(value, other)[3]) == "step_plan.candidates[0]: 'cut one' != 'x' (2 of 2 entries differ)"


def test_a_shared_difference_is_told_once() -> None:
    plan, other = cases.plan(), replace(cases.plan(), chunk_size=32)
    left, right = (PerMicrobatch(cases.step(), (each, each)) for each in (plan, other))
    assert [each.path for each in diff(left, right)] == ["per_microbatch.items[0].chunk_size"]


def test_kinds_differ() -> None:
    assert str(diff(cases.plan(), cases.tree())[0]) == "round_plan: round_plan != segment_tree"
    none_or_number = replace(cases.step(), capacity=None)
    assert str(diff(none_or_number, cases.step())[0]) == "step_plan.capacity: absent != 100"


def logprobs(*values: float) -> Value:
    return replace(cases.semantic_outputs(), logprobs=np.array([*values, *[0.0] * (220 - len(values))]))


def test_floats_are_compared_by_bits_and_nan_equals_nan() -> None:
    assert diff(logprobs(np.nan, 1.0), logprobs(-np.nan, 1.0)) == []
    assert len(diff(logprobs(0.0), logprobs(-0.0))) == 1
    assert len(diff(logprobs(1.0), logprobs(np.nextafter(1.0, 2.0)))) == 1
    assert len(diff(logprobs(1.0), logprobs(np.nan))) == 1


@pytest.mark.parametrize(
    ("left", "right", "near"),
    [
        (0.5, 0.509, True),
        (0.5, 0.511, False),
        (100.0, 100.9, True),
        (100.0, 102.0, False),
        (np.inf, np.inf, True),
        (np.inf, -np.inf, False),
        (np.inf, 1e300, False),
        (np.nan, np.nan, True),
        (np.nan, 0.0, False),
        (0.0, -0.0, True),
    ],
)
def test_tolerance_is_absolute_below_one_and_relative_above(left: float, right: float, near: bool) -> None:
    assert (diff(logprobs(left), logprobs(right), tolerance=0.01) == []) == near


def test_tolerance_does_not_apply_to_integers() -> None:
    assert len(diff(cases.plan(), replace(cases.plan(), anchor=cases.ints(0, 0, 65)), tolerance=0.5)) == 1


def test_tensors_are_compared_with_arrays() -> None:
    torch = pytest.importorskip("torch")
    value = cases.outputs()
    tensor = torch.tensor(value.hidden, requires_grad=True)
    assert diff(value, replace(value, hidden=tensor)) == []


def test_format_counts_what_it_leaves_out() -> None:
    found = [Difference("a", 1, 2), Difference("b", 1, 2), Difference("c", 1, 2)]
    assert format_diff(found, limit=1) == "a: 1 != 2\n... 2 more differences"
    assert format_diff(found, limit=3).count("\n") == 2
    assert format_diff([]) == "equal"
