"""One training step: every microbatch forward and backward, gradients accumulated, then one optimizer step.

Nothing of a microbatch's graph outlives it. An untrained token still is a semantic token: it counts in the router
losses and in the experts' loads, as in trajectory-wise training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import Env
from harts.errors import HartsError
from harts.ir import CompactLayout, CompactOutputs, PerMicrobatch, SegmentTree, SemanticOutputs, StepPlan
from harts.ir.base import Float64, Int64
from harts.ir.runs import offsets, ranges
from harts.train.check import check_rollouts
from harts.train.config import TrainConfig
from harts.train.objectives import LossTerms, Objective


@dataclass(frozen=True)
class StepResult:
    """What one step gave; its gradients are in the parameters' `grad`."""

    loss: float
    """Policy loss plus router losses with their coefficients."""
    policy_loss: float
    router_z: float | None
    """Mean over the step's semantic tokens, before its coefficient; None without MoE."""
    router_balance: float | None
    """Mean over microbatches weighted by semantic tokens, before its coefficient; None without MoE."""
    logprobs: Float64
    """Trajectory after trajectory in the caller's order, in nats, [S - N]."""
    entropy: Float64 | None
    """As `logprobs`; None if it is not restored."""
    offset: Int64
    """Predictions of trajectory i of the caller's batch are offset[i]:offset[i+1], [N + 1]."""
    expert_load: Tensor | None
    """Semantic assignments of each expert over the step, [MoE layers, E]; None without MoE."""
    trained_tokens: int
    """0 says that the step has nothing to train: loss and gradients are 0, and there is no optimizer step."""
    gradient_norm: float
    """Euclidean, over all parameters."""
    seconds: float
    """Of forward and backward of all microbatches."""


def run_step(
    layouts: PerMicrobatch[CompactLayout],
    execute: Any,
    restore: Any,
    objective: Objective,
    config: TrainConfig,
    *,
    on_microbatch: Callable[[int], None] | None = None,
) -> StepResult:
    """Compute the loss and the gradients of a step, replacing the gradients that the parameters hold.

    Args:
        layouts: every microbatch of the step.
        execute: stage CompactLayout -> CompactOutputs; `execute.env` holds the model.
        restore: stage CompactOutputs -> SemanticOutputs.
        objective: gives each microbatch's share of the policy loss.
        config: coefficients of the router losses.
        on_microbatch: called with each microbatch's number once its backward is done.

    Raises:
        InputError: the rollouts lack a column or hold a token outside the vocabulary.
        HartsError: a loss or a gradient is not finite; the microbatch or parameter is named.
    """
    check_rollouts(layouts, objective, execute.env.model.vocabulary)
    module = execute.env.model.module
    module.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    totals = _Totals(layouts.step, objective, config)
    for index, layout in enumerate(layouts.items):
        totals.add(index, restore.run(execute.run(layout)))  # bound to no name: freed before the next one
        if on_microbatch is not None:
            on_microbatch(index)
    norm = gradient_norm(module.named_parameters())  # waits for the device, so it belongs to the time
    return totals.result([layout.plan.tree for layout in layouts.items], norm, time.perf_counter() - begin)


@dataclass
class _Totals:
    """What the microbatches of a step add up to."""

    step: StepPlan
    objective: Objective
    config: TrainConfig
    policy: float = 0.0
    router_z: float | None = None
    router_balance: float | None = None
    expert_load: Tensor | None = None
    logprobs: list[Float64] = field(default_factory=list)
    entropy: list[Float64] = field(default_factory=list)

    def add(self, index: int, restored: SemanticOutputs) -> None:
        """Run one microbatch's backward and keep its numbers."""
        outputs = restored.outputs
        columns = outputs.layout.plan.tree.columns
        policy = self.objective.loss(LossTerms(restored.logprobs, restored.entropy, columns, self.step))
        loss = policy + self._router(outputs, int(columns.offset[-1]) / self.step.semantic_tokens)
        value, share = float(loss.detach()), float(policy.detach())
        if not math.isfinite(value):
            raise HartsError(f"microbatch {index}: the loss is {value}, of it the objective {share}")
        torch.autograd.backward(loss)
        self.policy += share
        if outputs.expert_load is not None:
            load = outputs.expert_load.double()
            self.expert_load = load if self.expert_load is None else self.expert_load + load
        self.logprobs.append(_host(restored.logprobs))
        if restored.entropy is not None:
            self.entropy.append(_host(restored.entropy))

    def _router(self, outputs: CompactOutputs, part: float) -> Tensor | float:
        """Router losses of a microbatch that holds this part of the step's semantic tokens."""
        loss: Tensor | float = 0.0
        if outputs.router_z is not None:
            share = outputs.router_z / self.step.semantic_tokens
            self.router_z = (self.router_z or 0.0) + float(share.detach())
            loss = loss + self._coefficient("router_z") * share
        if outputs.router_balance is not None:
            share = outputs.router_balance * part
            self.router_balance = (self.router_balance or 0.0) + float(share.detach())
            loss = loss + self._coefficient("router_balance") * share
        return loss

    def _coefficient(self, loss: str) -> float:
        """Of a router loss; 0 in a step that trains nothing, whose loss and gradients are exactly 0."""
        given: float = getattr(self.config, f"{loss}_coefficient")
        return given if self.step.trained_tokens else 0.0

    def result(self, trees: list[SegmentTree], norm: float, seconds: float) -> StepResult:
        """The step's numbers, log-probs in the caller's order."""
        offset = _prediction_offset(trees)
        router = self._coefficient("router_z") * (self.router_z or 0.0)
        router += self._coefficient("router_balance") * (self.router_balance or 0.0)
        return StepResult(
            loss=self.policy + router,
            policy_loss=self.policy,
            router_z=self.router_z,
            router_balance=self.router_balance,
            logprobs=_caller_order(trees, offset, self.logprobs),
            entropy=_caller_order(trees, offset, self.entropy) if self.entropy else None,
            offset=offset,
            expert_load=self.expert_load,
            trained_tokens=self.step.trained_tokens,
            gradient_norm=norm,
            seconds=seconds,
        )


def apply_step(env: Env, optimizer: torch.optim.Optimizer, result: StepResult) -> None:
    """Update the parameters, and the expert biases from the whole step's loads; nothing if nothing was trained."""
    if result.trained_tokens == 0:
        return
    optimizer.step()
    if result.expert_load is not None:
        env.model.update_expert_bias(result.expert_load)


def build_optimizer(config: TrainConfig, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over all parameters."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), lr=config.learning_rate)
    return torch.optim.AdamW(module.parameters(), lr=config.learning_rate, weight_decay=0.0)


def gradient_norm(parameters: Iterable[tuple[str, Tensor]]) -> float:
    """Euclidean norm of all gradients.

    Raises:
        HartsError: a gradient is not finite; the parameter is named.
    """
    total = 0.0
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        square = float(parameter.grad.double().square().sum())
        if not math.isfinite(square):
            raise HartsError(f"parameter {name}: its gradient is not finite")
        total += square
    return math.sqrt(total)


def _prediction_offset(trees: list[SegmentTree]) -> Int64:
    count = np.empty(sum(len(tree.key) for tree in trees), dtype=np.int64)
    for tree in trees:
        count[tree.key] = tree.columns.length - 1
    return offsets(count)


def _caller_order(trees: list[SegmentTree], offset: Int64, parts: list[Float64]) -> Float64:
    out = np.empty(int(offset[-1]))
    for tree, part in zip(trees, parts, strict=True):
        out[ranges(offset[tree.key], offset[tree.key + 1])] = part
    return out


def _host(values: Tensor) -> Float64:
    return np.asarray(values.detach().double().cpu().numpy())
