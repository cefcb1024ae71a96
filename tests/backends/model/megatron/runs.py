"""Small Megatron models, and one batch on compact rows, on flat ones, and as Megatron itself runs it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.megatron.backend import MegatronModel
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout
from tests.forests import random_trajectories
from tests.parity.trees import Paths, layout_of, rows_by_trajectory

CHUNK, VOCABULARY = 4, 24
Z, BALANCE = 1e-2, 0.3
"""Factors of the router losses in the loss."""
SINGLE = 1e-5

GQA: dict[str, Any] = {"attention": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 6}
MLA: dict[str, Any] = {
    "attention": "mla",
    "heads": 2,
    "q_rank": 5,
    "kv_rank": 6,
    "nope_dim": 4,
    "rope_dim": 4,
    "value_dim": 5,
}
MOE: dict[str, Any] = {"experts": 5, "top_k": 2, "intermediate_size": 8}
BIASED: dict[str, Any] = {**MOE, "scoring": "sigmoid", "expert_bias_rate": 0.01, "shared_intermediate_size": 8}
GROUPED: dict[str, Any] = {
    "moe": {**BIASED, "experts": 6},
    "overrides": {
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
}
"""Ling 3's routing: experts of the best group, and weights that add up to another number than 1."""


def config(**changes: Any) -> MegatronConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "layers": 4,
        "pattern": "KA",
        "rule": "kda",
        "linear_heads": 2,
        "linear_value_heads": 4,
        "linear_key_dim": 4,
        "linear_value_dim": 6,
        "conv_width": 4,
        **GQA,
        "intermediate_size": 20,
        "seed": 7,
        "init_std": 0.1,
    }
    return MegatronConfig(**(fields | changes))


def tiny(**changes: Any) -> MegatronModel:
    """A scrambled model over the two oracles."""
    return scrambled(MegatronModel(config(**changes), Naive(Naive.Config()), Sdpa(Sdpa.Config())))


def scrambled(model: MegatronModel) -> MegatronModel:
    """Move norms and selection biases from what they start at, which would hide whether they are used."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, each in model.module.state_dict().items():
            if isinstance(each, Tensor) and (each.dim() == 1 and "tokens_per_expert" not in name):
                each.add_(0.1 * torch.randn(each.shape, generator=draw).to(each))
    return model


def forest(seed: int) -> Paths:
    """Forks inside chunks and around their boundaries, one-token branches, a duplicate, prefixes, one token alone."""
    return [*random_trajectories(random.Random(seed), CHUNK, roots=1 + seed % 2, forks=3), [VOCABULARY - 1]]


def rectangle(seed: int, count: int = 6, length: int = 17) -> Paths:
    """Trajectories of one length, as Megatron takes them in a batch; one of them twice."""
    draw = random.Random(seed)

    def fresh(tokens: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(tokens)]

    paths = [fresh(length)]
    while len(paths) < count:
        kept = draw.randrange(1, length)
        paths.append(draw.choice(paths)[:kept] + fresh(length - kept))
    return [*paths, list(paths[0])]


def tensors(layout: CompactLayout) -> PlanTensors:
    return build_plan_tensors(layout, "cpu", torch.float32)


def compact(paths: Paths) -> CompactLayout:
    return layout_of(paths, CHUNK)


def flat(paths: Paths) -> CompactLayout:
    return layout_of(paths, CHUNK, "flat")


def without_multiplicity(plan: PlanTensors) -> PlanTensors:
    return replace(plan, multiplicity=(plan.multiplicity > 0).float())


def policy_loss(logits: list[Tensor], paths: Paths) -> Tensor:
    """A weight of its own for every prediction, shared or not, over the number of tokens."""
    draw = torch.Generator().manual_seed(5)
    loss = logits[0].new_zeros(())
    for of_path, path in zip(logits, paths, strict=True):
        weight = torch.randn(len(path) - 1, generator=draw).to(of_path)
        logprob = (
            of_path[: len(path) - 1]
            .log_softmax(-1)
            .gather(1, of_path.new_tensor(path[1:], dtype=torch.int64)[:, None])[:, 0]
        )
        loss = loss + (weight * logprob).sum()
    return loss / sum(map(len, paths))


def planned_loss(model: MegatronModel, layout: CompactLayout, paths: Paths, plan: PlanTensors | None = None) -> Tensor:
    """Loss on the rows of a layout, router losses included."""
    out = model.forward(plan or tensors(layout))
    logits = out.hidden @ model.head_weight().T
    loss = policy_loss([logits[rows] for rows in rows_by_trajectory(layout)], paths)
    if out.router_z is None or out.router_balance is None:
        return loss
    return loss + Z * out.router_z / sum(map(len, paths)) + BALANCE * out.router_balance


def gradients(module: Any, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter; experts that nobody chose have none or zeros."""
    module.zero_grad(set_to_none=True)
    loss.backward()
    named = dict(module.named_parameters())
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}


def one_by_one(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of experts as Megatron's sequence of experts has them."""
    found = {}
    for name, each in named.items():
        if not name.endswith(("experts.gate_up", "experts.down")):
            found[name] = each
            continue
        prefix, part = name.rsplit(".", 1)
        linear = {"gate_up": "linear_fc1", "down": "linear_fc2"}[part]
        found |= {f"{prefix}.local_experts.{e}.{linear}.weight": weight.T for e, weight in enumerate(each)}
    return found


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of every parameter: |got - wanted| over |wanted|, or over a hundredth of the norm of all if that is larger.

    Where terms cancel in a gradient, its rounding in float32 is of the size of the terms.
    """
    assert set(got) == set(wanted)
    floor = 1e-2 * float(torch.stack([each.norm() for each in wanted.values()]).norm())
    return {name: float((got[name] - each).norm()) / max(float(each.norm()), floor) for name, each in wanted.items()}
