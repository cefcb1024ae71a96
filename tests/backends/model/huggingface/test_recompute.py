"""Gradient checkpointing does what was asked for: the caller's own stays his, and none drops a gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from harts.backends.model.huggingface.backend import HuggingFace
from harts.errors import BackendError
from tests.backends.model.huggingface.models import CHUNK, WITH_EXPERTS, handed_over, tiny
from tests.backends.model.huggingface.runs import compact, forest, gradients
from tests.parity.trees import layout_of

LAYOUT = layout_of(forest(0), CHUNK)


def _gradients(model: HuggingFace) -> dict[str, Tensor]:
    compact(model, LAYOUT).loss.backward()
    return gradients(model.module)


def test_recomputation_of_a_model_in_eval_mode_is_refused() -> None:
    module = tiny("qwen3_5").module.eval()
    model = handed_over(module, recompute="full")
    with pytest.raises(BackendError, match=r"recompute is full, but 3 of 3 layers are in eval mode, .*model.train\(\)"):
        compact(model, LAYOUT)
    with torch.no_grad():  # nothing is saved, so there is nothing to recompute
        assert compact(model, LAYOUT).loss.isfinite()
    module.train()
    module.model.layers[1].eval()
    with pytest.raises(BackendError, match="1 of 3 layers"):
        compact(model, LAYOUT)
    module.train()
    assert compact(model, LAYOUT).loss.requires_grad


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_of_the_callers_own_is_kept(family: str, every: int) -> None:
    wanted = _gradients(tiny(family))
    module = tiny(family).module
    module.activation_checkpointing_enable(every_n_layers=every)
    on = [layer.gradient_checkpointing for layer in module.model.layers]
    model = handed_over(module)
    got = _gradients(model)
    assert [layer.gradient_checkpointing for layer in module.model.layers] == on == [i % every == 0 for i in range(3)]
    assert all(torch.equal(each, got[name]) for name, each in wanted.items())


@pytest.mark.parametrize(
    ("own", "layers"),
    [
        ({"every_n_layers": 2}, 2),
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, 3),
        ({"offload": 1}, 3),
    ],
)
def test_checkpointing_of_the_callers_own_is_not_overwritten(own: dict[str, Any], layers: int) -> None:
    module = tiny("qwen3_5").module
    module.activation_checkpointing_enable(**own)
    before = [(layer.gradient_checkpointing, layer._gradient_checkpointing_func) for layer in module.model.layers]
    with pytest.raises(BackendError, match=f"recompute is full, but it checkpoints {layers} of 3 layers in a way of"):
        handed_over(module, recompute="full")
    assert [(each.gradient_checkpointing, each._gradient_checkpointing_func) for each in module.model.layers] == before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_module_whose_layers_are_all_recomputed_can_be_handed_over_again(dtype: str) -> None:
    model = tiny("qwen3_5", dtype=dtype, recompute="full")
    again = handed_over(model.module, recompute="full")
    assert torch.equal(compact(again, LAYOUT).loss, compact(model, LAYOUT).loss)


def test_checkpointing_of_the_callers_own_in_float64_is_refused() -> None:
    module = tiny("qwen3_5", dtype="float64").module
    module.activation_checkpointing_enable()
    with pytest.raises(BackendError, match="it is float64, and its own checkpointing computes layers again in float32"):
        handed_over(module)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_that_are_recomputed_without_their_attention_are_noticed(family: str) -> None:
    """They are given no plan, and may run again after another microbatch's attention."""
    model = tiny(family)
    for layer in model.module.model.layers:
        layer.mlp.forward = partial(checkpoint, partial(type(layer.mlp).forward, layer.mlp), use_reentrant=False)
    first, _ = (compact(model, layout_of(forest(seed), CHUNK, row_multiple=128)) for seed in (0, 1))
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        first.loss.backward()


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_reentrant_checkpointing_of_experts_is_refused(family: str) -> None:
    module = tiny(family).module
    module.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(BackendError, match="its checkpointing is reentrant, which drops gradients of router losses"):
        handed_over(module)


def test_reentrant_checkpointing_of_a_dense_model_drops_nothing() -> None:
    wanted = _gradients(tiny("qwen3_5"))
    module = tiny("qwen3_5").module
    module.activation_checkpointing_enable({"use_reentrant": True})
    got = _gradients(handed_over(module))
    assert all(torch.equal(each, got[name]) for name, each in wanted.items())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("trained", ["", "mlp.gate.weight", "layers.0."])
def test_reentrant_checkpointing_that_is_switched_on_later_is_refused(recompute: str, trained: str) -> None:
    model = tiny("kimi_linear", recompute=recompute)
    for name, each in model.module.named_parameters():
        each.requires_grad_(trained in name)
    compact(model, LAYOUT).loss.backward()
    model.module.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(BackendError, match="router statistics of layers 1, 2 have no gradient, though what they"):
        compact(model, LAYOUT)
    with torch.no_grad():
        assert compact(model, LAYOUT).loss.isfinite()


def test_statistics_of_what_is_not_trained_need_no_gradient() -> None:
    model = tiny("kimi_linear")
    for name, each in model.module.named_parameters():
        each.requires_grad_(name == "model.norm.weight")
    found = compact(model, LAYOUT)
    assert found.z is not None and not found.z.requires_grad
    found.loss.backward()
    assert set(gradients(model.module)) == {"model.norm.weight"}
