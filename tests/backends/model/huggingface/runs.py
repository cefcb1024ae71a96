"""One batch, on compact rows and trajectory by trajectory, with all that the two have to agree on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout
from tests.backends.model.huggingface.models import CHUNK, EXPERTS, TOP_K, VOCABULARY, routers
from tests.forests import random_trajectories
from tests.parity.trees import Paths, rows_by_trajectory

Z, BALANCE = 1e-3, 0.3
"""Factors of the router losses in the loss."""


def forest(seed: int) -> Paths:
    """Forks inside chunks and around their boundaries, one-token branches, a duplicate, prefixes, one token alone."""
    paths = random_trajectories(random.Random(seed), CHUNK, roots=1 + seed % 2, forks=3)
    return [*paths, [VOCABULARY - 1]]


def tensors(layout: CompactLayout, dtype: torch.dtype = torch.float32) -> PlanTensors:
    return build_plan_tensors(layout, "cpu", dtype)


@dataclass(frozen=True)
class Found:
    """What one execution of a batch gives."""

    loss: Tensor
    logits: list[Tensor]
    """Of each trajectory, [length, vocabulary]."""
    z: Tensor | None
    balance: Tensor | None
    load: Tensor | None

    @property
    def value(self) -> float:
        return float(self.loss.detach())


def compact(model: HuggingFace, layout: CompactLayout, plan: PlanTensors | None = None) -> Found:
    """Forward on the rows of a layout, and the loss."""
    plan = plan or tensors(layout, next(model.module.parameters()).dtype)
    out = model.forward(plan)
    logits = out.hidden @ model.head_weight().T
    of_paths = [logits[rows] for rows in rows_by_trajectory(layout)]
    ids = [plan.input_ids[rows] for rows in rows_by_trajectory(layout)]
    return _found(of_paths, ids, out.router_z, out.router_balance, out.expert_load)


def trajectory_wise(model: Any, paths: Paths, family: str, first: int = 0) -> Found:
    """Forward of every trajectory alone through the model of transformers, and the loss; positions start at `first`."""
    parts = routers(model, family)
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]

    def keep(layer: int) -> Any:
        return lambda _module, _given, output: seen[layer].append((output[0], output[-1]))

    handles = [router.register_forward_hook(keep(layer)) for layer, router in enumerate(parts)]
    ids = [torch.tensor(path) for path in paths]
    positions = [torch.arange(first, first + len(path))[None] for path in paths]
    logits = [
        model(input_ids=each[None], position_ids=position, use_cache=False).logits[0]
        for each, position in zip(ids, positions, strict=True)
    ]
    for handle in handles:
        handle.remove()
    if not parts:
        return _found(logits, ids, None, None, None)
    softmax = family.startswith("qwen")
    layers = [_statistics(*(torch.cat(each) for each in zip(*layer, strict=True)), softmax) for layer in seen]
    z, balance, load = (torch.stack(each) for each in zip(*layers, strict=True))
    return _found(logits, ids, z.sum(), balance.sum(), load)


def _statistics(logits: Tensor, chosen: Tensor, softmax: bool) -> tuple[Tensor, Tensor, Tensor]:
    """z, balance and load of one layer, every position counted once."""
    score = logits.softmax(-1) if softmax else logits.sigmoid()
    mass = (score / score.sum(-1, keepdim=True)).mean(0)
    load = torch.stack([(chosen == expert).sum() for expert in range(EXPERTS)]).to(logits.dtype)
    balance = EXPERTS * (load / (len(logits) * TOP_K) * mass).sum()
    return logits.logsumexp(-1).square().sum(), balance, load


def _found(
    logits: Sequence[Tensor], ids: Sequence[Tensor], z: Tensor | None, balance: Tensor | None, load: Tensor | None
) -> Found:
    """The loss has a weight of its own for every trained position, shared or not, and both router losses."""
    draw = torch.Generator().manual_seed(5)
    count = sum(map(len, ids))
    loss = logits[0].new_zeros(())
    for of_path, path in zip(logits, ids, strict=True):
        weight = torch.randn(len(path) - 1, generator=draw, dtype=torch.float64).to(of_path)
        logprob = of_path[:-1].log_softmax(-1).gather(1, path[1:, None])[:, 0]
        loss = loss + (weight * logprob).sum() / count
    if z is not None and balance is not None:
        loss = loss + Z * z / count + BALANCE * balance
    return Found(loss, list(logits), z, balance, load)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def relative(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """|got - wanted| over the larger of |wanted| and `floor`, Euclidean; 0 of 0 is 0."""
    apart, size = float((got - wanted).norm()), max(float(wanted.norm()), floor)
    return apart / size if size else apart


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor], floor: float = 0.0) -> dict[str, float]:
    """Of every parameter, relative to its norm, or to a part of the norm of all of them if that is larger."""
    assert got.keys() == wanted.keys()
    size = torch.stack([each.double().norm() for each in wanted.values()]).norm()
    return {name: relative(got[name].double(), each.double(), floor * float(size)) for name, each in wanted.items()}


def far(found: dict[str, float], bound: float) -> dict[str, float]:
    """Those past a bound."""
    return {name: each for name, each in found.items() if not each <= bound}


def shifted(plan: PlanTensors, first: int) -> PlanTensors:
    """The same rows, every trajectory starting at position `first`."""
    return replace(plan, position_ids=plan.position_ids + first)


def agree(ours: Found, theirs: Found, bound: float) -> None:
    """Loss, logits and router statistics; gradients are compared by `errors`."""
    assert abs(ours.value - theirs.value) <= bound * max(1.0, abs(theirs.value))
    for got, wanted in zip(ours.logits, theirs.logits, strict=True):
        assert relative(got, wanted) <= bound
    for name in ("z", "balance", "load"):
        got, wanted = getattr(ours, name), getattr(theirs, name)
        assert (got is None) == (wanted is None)
        assert got is None or relative(got, wanted) <= bound, name
