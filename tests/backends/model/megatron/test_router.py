"""Router losses and counts of Megatron's own training loops, by multiplicities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.model.invariant import linear
from harts.backends.model.megatron.backend import MegatronModel
from harts.errors import BackendError
from tests.backends.model.megatron.runs import (
    BIASED,
    GROUPED,
    MOE,
    SINGLE,
    compact,
    errors,
    one_by_one,
    policy_loss,
    rectangle,
    tensors,
    tiny,
    without_multiplicity,
)
from tests.parity.trees import Paths, rows_by_trajectory


def _native(model: MegatronModel, balance: str) -> Any:
    """The model as a training loop of Megatron builds it: router losses are in its configuration."""
    from harts.backends.model.megatron.layer import TreeGpt
    from harts.backends.model.megatron.spec import block_spec
    from tests.backends.model.megatron.stock import with_router_losses

    made = TreeGpt(
        with_router_losses(model.config, balance),
        block_spec(model.config, range(model.config.layers)),
        vocab_size=model.config.vocab_size,
        max_sequence_length=0,
        position_embedding_type="rope",
        rotary_base=model.config.rope_theta,
        rotary_percent=model.config.rotary_percent,
        share_embeddings_and_output_weights=False,
    )
    made.load_state_dict(model.module.state_dict())
    return made


def _step(model: MegatronModel, native: Any, batches: list[Paths], ones: bool = False) -> dict[str, Tensor]:
    """Gradients of all microbatches of a step, from the policy loss alone."""
    from harts.backends.model.megatron.run import Built, run

    built = Built(native, model.made.groups, model.made.rows)
    for paths in batches:
        layout = compact(paths)
        plan = without_multiplicity(tensors(layout)) if ones else tensors(layout)
        hidden = run(built, plan, model.linear, model.full, model.config).hidden
        logits = hidden @ native.output_layer.weight.T
        policy_loss([logits[rows] for rows in rows_by_trajectory(layout)], paths).backward()
    return one_by_one({name: each.grad for name, each in native.named_parameters()})


def _stock_step(theirs: Any, batches: list[Paths]) -> dict[str, Tensor]:
    from tests.backends.model.megatron.stock import stock_loss

    for paths in batches:
        stock_loss(theirs, paths).backward()
    # experts that no row came to have no gradient in Megatron's sequence of experts
    grads = {name: (each, each.grad) for name, each in theirs.named_parameters()}
    return {name: torch.zeros_like(each) if grad is None else grad for name, (each, grad) in grads.items()}


def _counts(module: Any) -> list[Tensor]:
    return [layer.mlp.router.local_tokens_per_expert for layer in module.decoder.layers]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("balance", ["aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("chosen", [{"moe": MOE}, {"moe": BIASED}, GROUPED])
def test_a_step_equals_that_of_megatrons_own_router(chosen: dict[str, Any], balance: str, recompute: str) -> None:
    from tests.backends.model.megatron.stock import stock

    model, batches = tiny(**chosen, recompute=recompute), [rectangle(1), rectangle(2, count=4)]
    theirs, native = stock(model, balance), _native(model, balance)
    wanted = _stock_step(theirs, batches)
    found = errors(_step(model, native, batches), wanted)
    assert max(found.values()) <= SINGLE, found
    if chosen["moe"].get("expert_bias_rate"):
        assert all(torch.equal(mine, other) for mine, other in zip(_counts(native), _counts(theirs), strict=True))
        assert int(_counts(native)[0].sum()) == 2 * sum(len(path) for paths in batches for path in paths)
    found = errors(_step(model, _native(model, balance), batches, ones=True), wanted)
    assert min(error for name, error in found.items() if name.endswith("router.weight")) > 1e-3, found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_logits_are_products_whose_rows_do_not_depend_on_their_number(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harts.backends.model.megatron import router

    model, outputs = tiny(moe=MOE, recompute=recompute), []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        outputs.append((len(weight), dtype))
        return linear(x, weight, bias, dtype)

    monkeypatch.setattr(router, "linear", counted)
    layout = compact(rectangle(1))
    hidden = model.forward(tensors(layout)).hidden
    layers = len(_counts(model.module))
    assert outputs == [(MOE["experts"], torch.float32)] * layers
    hidden.sum().backward()
    assert len(outputs) == layers * (1 + (recompute == "full"))


def test_autocast_changes_no_count() -> None:
    model = tiny(moe=BIASED, dtype="bfloat16")
    paths = [[1, 2, 3, 4, 5, 6, first, 7, 8] for first in range(16) for _ in range(25)]
    with torch.autocast("cpu", torch.bfloat16):
        load = model.forward(tensors(compact(paths))).expert_load
    assert load is not None
    assert load.sum(1).tolist() == [BIASED["top_k"] * sum(map(len, paths))] * len(load)
    assert torch.equal(load, torch.stack(_counts(model.module)))


def test_losses_by_trajectory_are_refused() -> None:
    from harts.backends.model.megatron.options import refusals
    from tests.backends.model.megatron.stock import with_router_losses

    model, paths = tiny(moe=MOE), rectangle(3)
    with pytest.raises(BackendError, match="layer 1: seq_aux_loss: plans do not tell a trajectory's rows"):
        _step(model, _native(model, "seq_aux_loss"), [paths])
    options = with_router_losses(model.config, "seq_aux_loss")
    assert [reason.split(",")[0] for reason in refusals(options)] == ["moe_router_load_balancing_type is seq_aux_loss"]
