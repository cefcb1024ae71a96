"""KDA and GDN on whole microbatches, in both executions, against float64 and against trajectories by themselves."""

import pytest
import torch

from tests.backends.linear.tree.cases import (
    BOUNDARIES,
    FORKS,
    Result,
    Shape,
    as_given,
    backend,
    bits_of_trajectories,
    exact,
    layout_of,
    layout_of_spec,
    memory_of_nan,
    plan_of,
    prefix_run,
    random_inputs,
    run,
)
from tests.forests import Spec, paths_of

PRECISION = {"cpu": (torch.float32, 3e-6), "cuda": (torch.bfloat16, 1e-2)}
"""Dtype of rows, and the relative error of outputs and gradients."""
HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}
KDA_SAFE = ("kda", {"safe_gate": True})
GDN = ("gdn", {})
RULES = [KDA_SAFE, GDN]


RETRIES: Spec = [(-1, 70), (0, 60), (0, 3), (2, 1), (2, 62)]
"""Three rounds in few rows."""


def half_result(rule: str, config: dict[str, object], spec: Spec, device: str) -> Result:
    layout = layout_of_spec(spec)
    inputs = as_given(random_inputs(layout.rows, rule, Shape(1, 1, 16, 16)), HALF[device], device)
    return run(backend(rule, **config), inputs, plan_of(layout, device))


EXECUTIONS = [(*KDA_SAFE, "fused"), (*GDN, "fused"), (*GDN, "rounds")]


@pytest.mark.parametrize(("rule", "config", "execution"), EXECUTIONS, ids=str)
def test_outputs_and_gradients_equal_the_oracle(rule, config, execution, device):
    layout = layout_of_spec(FORKS, row_multiple=64)
    inputs = as_given(random_inputs(len(layout.input_ids), rule, Shape()), PRECISION[device][0], device)
    found = run(backend(rule, execution=execution, **config), inputs, plan_of(layout, device))
    errors = found.errors(exact(inputs, layout))
    assert max(errors.values()) < PRECISION[device][1], errors
    assert not found.output[layout.rows :].any()
    assert not any(x[layout.rows :].any() for x in found.gradients.values())


def test_gates_without_a_bound_equal_the_oracle(device):
    layout = layout_of_spec([(-1, 67), (0, 3), (0, 5)])
    inputs = as_given(random_inputs(layout.rows, "kda", Shape(1, 1, 16, 16)), PRECISION[device][0], device)
    found = run(backend("kda"), inputs, plan_of(layout, device))
    errors = found.errors(exact(inputs, layout))
    assert max(errors.values()) < PRECISION[device][1], errors


@pytest.mark.parametrize("spec", [FORKS, BOUNDARIES], ids=["forks", "boundaries"])
@pytest.mark.parametrize(("rule", "config"), RULES, ids=str)
def test_outputs_have_the_bits_of_each_trajectory_by_itself(rule, config, spec, device):
    trajectories = paths_of(spec)
    rows = layout_of(trajectories).rows
    inputs = as_given(random_inputs(rows, rule, Shape(1, 1, 16, 16)), HALF[device], device)
    assert torch.equal(*bits_of_trajectories(backend(rule, **config), inputs, trajectories))


@pytest.mark.parametrize(("rule", "config"), RULES, ids=str)
def test_a_run_repeats_its_bits_whatever_memory_holds(rule, config, device):
    first = half_result(rule, config, RETRIES, device)
    with memory_of_nan():
        assert first.same_bits(half_result(rule, config, RETRIES, device))


@pytest.mark.parametrize(("rule", "config"), RULES, ids=str)
def test_both_executions_have_the_same_output_bits(rule, config, device):
    layout = layout_of_spec(RETRIES)
    inputs = as_given(random_inputs(layout.rows, rule, Shape(1, 1, 16, 16)), HALF[device], device)
    plan = plan_of(layout, device)
    with torch.no_grad():
        fused, rounds = (backend(rule, execution=each, **config).mix(inputs, plan) for each in ("fused", "rounds"))
    assert torch.equal(fused, rounds)


BLOCKS = [
    (*KDA_SAFE, Shape(1, 2, 24, 40)),
    (*KDA_SAFE, Shape(1, 1, 192, 16)),
    (*GDN, Shape(2, 4, 24, 40)),
    (*GDN, Shape(1, 1, 96, 16)),
    (*GDN, Shape(1, 1, 16, 192)),
]


@pytest.mark.parametrize(("rule", "config", "shape"), BLOCKS, ids=str)
def test_head_dims_that_do_not_fill_blocks(rule, config, shape, device):
    layout = layout_of_spec([(-1, 67), (0, 2), (0, 62)])
    inputs = as_given(random_inputs(layout.rows, rule, shape), PRECISION[device][0], device)
    errors = run(backend(rule, **config), inputs, plan_of(layout, device)).errors(exact(inputs, layout))
    assert max(errors.values()) < PRECISION[device][1], errors


@pytest.mark.parametrize(("later", "seed"), [(1, 1), (1, 2), (50, 3)])
def test_later_tokens_change_no_bit_of_earlier_outputs_and_gradients(later, seed, device):
    # gates near their bound, a sequence that ends inside a sub-chunk: where rounding once told of later gates
    operator = backend("kda", safe_gate=True)
    alone = prefix_run(operator, 0, 0, HALF[device], device)
    assert alone.same_bits(prefix_run(operator, later, seed, HALF[device], device))


def test_second_derivatives_are_refused(device):
    layout = layout_of_spec([(-1, 10)])
    inputs = as_given(random_inputs(layout.rows, "gdn", Shape(1, 1, 16, 16)), HALF[device], device)
    output = backend("gdn").mix(inputs, plan_of(layout, device))
    (first,) = torch.autograd.grad(output.float().square().sum(), inputs["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.float().square().sum().backward()


def test_kept_states_give_the_same_bits_as_states_computed_again(device):
    walked_again, kept = (half_result("gdn", {"keep_states": keep}, RETRIES, device) for keep in (False, True))
    assert kept.same_bits(walked_again)


def test_a_tree_sees_nothing_of_another_and_gets_no_gradient_from_it(device):
    first, second = paths_of([(-1, 70), (0, 3), (0, 9)]), [[30 + i for i in range(20)]]
    layout = layout_of([*first, *second])
    inputs = as_given(random_inputs(layout.rows, "gdn", Shape()), PRECISION[device][0], device)
    output = backend("gdn").mix(inputs, plan_of(layout, device))
    rows = torch.from_numpy(layout.semantic_map.rows()).to(device)
    of_second = rows[-20:]
    gradients = torch.autograd.grad(output[of_second].square().sum(), list(inputs.values()))
    others = torch.ones(layout.rows, dtype=torch.bool, device=device)
    others[of_second] = False
    for gradient in gradients:
        assert not gradient[others].any()
        assert gradient[of_second].any()


def test_poison_in_padding_rows_reaches_nothing(device):
    layout = layout_of_spec([(-1, 70), (0, 3), (0, 9)], row_multiple=64)
    assert layout.rows < len(layout.input_ids)
    clean = random_inputs(len(layout.input_ids), "gdn", Shape())
    poisoned = {name: x.clone() for name, x in clean.items()}
    for x in poisoned.values():
        x[layout.rows :] = torch.nan
    plan = plan_of(layout, device)
    found = [run(backend("gdn"), as_given(each, PRECISION[device][0], device), plan) for each in (clean, poisoned)]
    assert found[0].same_bits(found[1])


def test_many_one_token_branches(device):
    layout = layout_of_spec([(-1, 65), *[(0, 1)] * 16])
    inputs = as_given(random_inputs(layout.rows, "gdn", Shape(1, 1, 16, 16)), PRECISION[device][0], device)
    errors = run(backend("gdn"), inputs, plan_of(layout, device)).errors(exact(inputs, layout))
    assert max(errors.values()) < PRECISION[device][1], errors
