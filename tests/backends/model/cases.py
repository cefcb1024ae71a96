"""Tiny float64 models, compact and flat layouts of the same trajectories, and what their comparison needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import ModelOutput
from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.config import ReferenceConfig
from harts.backends.model.reference import Reference
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout
from harts.stages.call_plan.flat import Flat
from harts.stages.call_plan.min_call import MinCall
from harts.stages.layout.round_major import RoundMajor
from tests.forests import tree_of

CHUNK, CONV_WIDTH, VOCABULARY = 4, 3, 24

MOE = {"experts": 5, "top_k": 2, "intermediate_size": 6, "shared_intermediate_size": 8, "expert_bias_rate": 0.01}
GQA = {"attention": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 6}
MLA = {"attention": "mla", "heads": 2, "kv_rank": 6, "nope_dim": 4, "rope_dim": 4, "value_dim": 5}

Trajectories = Sequence[Sequence[int]]

FORK = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 8], [1, 2]]
"""Two levels of forks, a duplicate and a strict prefix."""


def config(**changes: Any) -> ReferenceConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "layers": 3,
        "pattern": "KA",
        "rule": "kda",
        "linear_heads": 1,
        "linear_value_heads": 2,
        "linear_key_dim": 4,
        "linear_value_dim": 6,
        "conv_width": CONV_WIDTH,
        **GQA,
        "intermediate_size": 20,
        "dtype": "float64",
        "seed": 7,
        "init_std": 0.3,
    }
    return ReferenceConfig(**(fields | changes))


def reference(settings: ReferenceConfig) -> Reference:
    return Reference(settings, Naive(Naive.Config()), Sdpa(Sdpa.Config()))


def compact_layout(trajectories: Trajectories, row_multiple: int = 1) -> CompactLayout:
    plan = MinCall(MinCall.Config(chunk_size=CHUNK)).run(tree_of(trajectories))
    return RoundMajor(RoundMajor.Config(conv_width=CONV_WIDTH, row_multiple=row_multiple)).run(plan)


def flat_layout(trajectories: Trajectories) -> CompactLayout:
    plan = Flat(Flat.Config(chunk_size=CHUNK)).run(tree_of(trajectories))
    return RoundMajor(RoundMajor.Config(conv_width=CONV_WIDTH, row_multiple=1)).run(plan)


def tensors(layout: CompactLayout, dtype: torch.dtype = torch.float64) -> PlanTensors:
    return build_plan_tensors(layout, "cpu", dtype)


@dataclass
class Result:
    """What one execution gives, in semantic positions where it has rows."""

    output: ModelOutput
    hidden: Tensor
    """[S, hidden]."""
    gradients: dict[str, Tensor]


def execute(model: Reference, layout: CompactLayout, plan: PlanTensors | None = None) -> Result:
    """Forward, and backward from a loss with random weights on every semantic position and on the router's losses."""
    output = model.forward(plan or tensors(layout))
    hidden = output.hidden[torch.from_numpy(np.array(layout.semantic_map.rows()))]
    generator = torch.Generator().manual_seed(3)
    logits = hidden @ model.head_weight().T
    loss = (logits * torch.randn(logits.shape, dtype=torch.float64, generator=generator)).sum()
    if output.router_z is not None and output.router_balance is not None:
        loss = loss + 0.7 * output.router_z + 5.0 * output.router_balance
    parameters = dict(model.module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return Result(output, hidden.detach(), dict(zip(parameters, gradients, strict=True)))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def differences(got: Result, wanted: Result) -> dict[str, float]:
    """Relative difference of everything that two executions of one batch must agree on."""
    found = {"hidden": difference(got.hidden, wanted.hidden)}
    for name in ("router_z", "router_balance", "expert_load"):
        mine, theirs = getattr(got.output, name), getattr(wanted.output, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            found[name] = difference(mine, theirs)
    return found | {name: difference(got.gradients[name], grad) for name, grad in wanted.gradients.items()}
