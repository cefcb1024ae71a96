"""Hooks are those of one instance, and of calls with a plan; everything else in the process is as it was."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.model.huggingface.family import Family, family_named
from tests.backends.model.huggingface.models import (
    CHUNK,
    FAMILIES,
    OVERRIDES,
    WITH_SHARED_GATE,
    config,
    handed_over,
    routers,
    scramble,
    wrapped,
)
from tests.backends.model.huggingface.runs import compact, forest, gradients
from tests.parity.trees import layout_of

IDS = torch.tensor([[3, 5, 7, 11, 5, 3, 2, 9, 4], [4, 4, 8, 1, 2, 3, 20, 21, 22]])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    """With the functions in torch for plain calls, also where FLA is installed."""
    found = family_named(request.param)
    for name in (found.delta_rule, found.conv):
        monkeypatch.setattr(found.modeling, name, inspect.unwrap(getattr(found.modeling, name)))
    return found


def _plain(family: Family) -> Any:
    torch.manual_seed(0)
    made = family.model_class(family.config_class(**OVERRIDES[family.module]))
    scramble(made)
    return made.train()


def _logits(module: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


def _hooked(family: Family, module: Any) -> int:
    """Attention of each layer, and routers and gates of shared experts."""
    of_experts = 1 + (family.module in WITH_SHARED_GATE)
    return OVERRIDES[family.module]["num_hidden_layers"] + of_experts * len(routers(module, family.module))


def _through_a_file(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_process_is_as_it_was(family: Family) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    globals_before = dict(vars(family.modeling))
    functions = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    classes = (getattr(family.modeling, name) for name in (family.linear_layer, family.full_layer, family.model))
    forwards = {each: each.forward for each in classes}
    other = _plain(family)
    before = _logits(other)

    model = wrapped(config(family.module, recompute="full"))
    compact(model, layout_of(forest(0), CHUNK)).loss.backward()

    assert all(vars(family.modeling)[name] is each for name, each in globals_before.items())
    assert set(vars(family.modeling)) == set(globals_before)
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()} == functions
    assert all(each.forward is forward for each, forward in forwards.items())
    assert not any("forward" in vars(each) for each in other.modules())
    assert not any(each._forward_hooks for each in other.modules())
    assert torch.equal(_logits(other), before)


def test_calls_without_a_plan_do_what_they_did(family: Family) -> None:
    module = _plain(family)
    before, settings = _logits(module), module.config.to_dict()
    layout = layout_of(forest(0), CHUNK)
    model = handed_over(module)
    assert model.module is module
    assert module.config.to_dict() == settings
    assert torch.equal(_logits(module), before)
    found = compact(model, layout)
    assert torch.equal(_logits(module), before)  # a plan has run, and its backward pass is to come
    found.loss.backward()
    assert torch.equal(_logits(module), before)
    assert torch.equal(compact(model, layout).loss, found.loss)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_plain_calls_of_parts_do_what_they_did(family: Family, recompute: str) -> None:
    module, x = _plain(family), torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    parts = [layer.mlp for layer in module.model.layers]
    before = [part(x) for part in parts]
    model = handed_over(module, recompute=recompute)
    found = compact(model, layout_of(forest(0), CHUNK))
    assert all(torch.equal(part(x), each) for part, each in zip(parts, before, strict=True))
    found.loss.backward()
    assert all(torch.equal(part(x), each) for part, each in zip(parts, before, strict=True))


@pytest.mark.parametrize("place", ["self_attn", "mlp"])
def test_a_pass_that_fails_leaves_nothing(place: str) -> None:
    model, layout, kept = wrapped(config("kimi_linear")), layout_of(forest(0), CHUNK), []
    scramble(model.module)
    wanted = compact(model, layout)
    layers, x = model.module.model.layers, torch.randn(1, 5, 32)
    before = [layer.mlp(x) for layer in layers]

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handles = [layers[1].mlp.gate.register_forward_hook(lambda _module, _given, out: kept.append(weakref.ref(out[0])))]
    handles.append(getattr(layers[2], place).register_forward_pre_hook(fail))
    with pytest.raises(torch.OutOfMemoryError):
        compact(model, layout)
    for handle in handles:
        handle.remove()
    gc.collect()
    assert [each() for each in kept] == [None]
    assert all(torch.equal(layer.mlp(x), each) for layer, each in zip(layers, before, strict=True))
    assert torch.equal(compact(model, layout).loss, wanted.loss)


def test_generation_does_what_it_did(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in dir(family.modeling):
        if "recurrent" in name and callable(each := getattr(family.modeling, name)) and not isinstance(each, type):
            monkeypatch.setattr(family.modeling, name, inspect.unwrap(each))
    monkeypatch.setattr(family.modeling, "causal_conv1d_update", inspect.unwrap(family.modeling.causal_conv1d_update))
    module = _plain(family).eval()
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    before = module.generate(IDS, **how)
    model = handed_over(module)
    compact(model, layout_of(forest(0), CHUNK))
    assert torch.equal(module.generate(IDS, **how), before)
    assert not module.training  # a module that is handed over keeps its mode


def test_a_plain_call_between_forward_and_backward_changes_no_gradient(family: Family) -> None:
    grads = []
    for between in (False, True):
        model = wrapped(config(family.module, recompute="full"))
        found = compact(model, layout_of(forest(0), CHUNK))
        if between:
            _logits(model.module)
        found.loss.backward()
        grads.append([each.grad for each in model.module.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_a_module_that_is_handed_over_twice_has_one_set_of_hooks(family: Family) -> None:
    module = _plain(family)
    first = handed_over(module)
    layers = {name: each.forward for name, each in module.named_modules() if "forward" in vars(each)}
    assert len(layers) == _hooked(family, module)
    second = handed_over(module)
    assert {name: each.forward for name, each in module.named_modules() if "forward" in vars(each)} == layers
    assert max(len(each._forward_hooks) for each in module.modules()) <= 1
    layout = layout_of(forest(0), CHUNK)
    assert torch.equal(compact(first, layout).loss, compact(second, layout).loss)


@pytest.mark.parametrize(
    ("copied", "recompute"),
    [(copy.deepcopy, "none"), (copy.deepcopy, "full"), (_through_a_file, "none")],  # transformers cannot save "full"
)
def test_a_copy_is_a_model_of_its_own(family: Family, copied: Any, recompute: str) -> None:
    """It is made while the first has a call in flight, and runs another batch before that one's backward pass."""
    module, mine, other = _plain(family), layout_of(forest(0), CHUNK), layout_of(forest(1), CHUNK)
    first = handed_over(module, recompute=recompute)
    compact(first, mine).loss.backward()
    wanted = gradients(module)
    module.zero_grad()
    found = compact(first, mine)
    twin = copied(module)
    assert torch.equal(_logits(twin), _logits(module))
    second = handed_over(twin, recompute=recompute)
    alone = handed_over(_plain(family), recompute=recompute)
    theirs = [compact(each, other) for each in (second, alone)]
    for each in (*theirs, found):
        each.loss.backward()
    assert torch.equal(theirs[0].loss, theirs[1].loss)
    for got, expected in ((module, wanted), (twin, gradients(alone.module))):
        assert all(torch.equal(each, gradients(got)[name]) for name, each in expected.items())
    assert max(len(each._forward_hooks) for each in twin.modules()) <= 1


def test_plain_calls_keep_the_decorators_of_attention(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def counted(function: Any) -> Any:
        @wraps(function)
        def decorated(self: Any, *given: Any, **others: Any) -> Any:
            called.append(self.layer_idx)
            return function(self, *given, **others)

        return decorated

    for name in (family.linear_layer, family.full_layer):
        cls = getattr(family.modeling, name)
        monkeypatch.setattr(cls, "forward", counted(cls.forward))
    model = handed_over(_plain(family))
    _logits(model.module)
    assert called == [0, 1, 2]
