from dataclasses import replace

import numpy as np
import torch

from harts.backends.base import Env
from harts.ir import CompactLayout, CompactOutputs
from harts.registry import resolve
from harts.stages.base import StageConfig
from harts.stages.execute.compact import Compact
from tests.backends.model.cases import FORK, MOE, compact_layout, config, reference


def run(layout: CompactLayout, **changes: object) -> CompactOutputs:
    model = reference(config(**changes))
    return Compact(StageConfig(), Env(model, "cpu", model.config.torch_dtype)).run(layout)


def test_is_registered_with_its_edge_and_needs_an_env() -> None:
    assert resolve("execute", "compact") is Compact
    assert Compact.edge == (CompactLayout, CompactOutputs)
    assert Compact.needs_env


def test_outputs_carry_the_layout_and_the_graph() -> None:
    layout = compact_layout(FORK, row_multiple=8)
    out = run(layout)
    out.verify()
    assert out.layout is layout
    assert out.hidden.shape == (len(layout.input_ids), 16)
    assert out.hidden.requires_grad
    assert out.router_z is None and out.router_balance is None and out.expert_load is None


def test_router_statistics_are_handed_on() -> None:
    out = run(compact_layout(FORK), moe=MOE)
    assert out.router_z.requires_grad and out.router_balance.requires_grad
    assert out.expert_load.shape == (3, 5)


def test_load_counts_large_multiplicities_exactly_in_bfloat16() -> None:
    layout = compact_layout([[1, 2, 3]])
    many = replace(layout, multiplicity=np.array([257, 1001, 3]))
    load = run(many, moe={**MOE, "top_k": 5}, dtype="bfloat16").expert_load
    assert torch.equal(load, torch.full((3, 5), 1261.0))
