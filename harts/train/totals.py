"""What the microbatches of a step add up to, wherever they are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.backends.gradients import Pass
from harts.backends.split import Split
from harts.errors import HartsError
from harts.ir import CompactLayout, CompactOutputs, PerMicrobatch, SegmentTree, SemanticOutputs
from harts.ir.base import Float64, Int64
from harts.ir.runs import offsets, ranges
from harts.train.config import TrainConfig
from harts.train.objectives import LossTerms, Objective


@dataclass(frozen=True)
class StepResult:
    """What one step gave; its gradients are with the model: in `grad`, or in buffers of what splits it."""

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


class Totals:
    """Collects a step's numbers. Each process adds what it computes; `gather` sums over them."""

    def __init__(
        self, layouts: PerMicrobatch[CompactLayout], objective: Objective, config: TrainConfig, split: Split
    ) -> None:
        self.step, self.objective, self.config, self.split = layouts.step, objective, config, split
        self.trees = [layout.plan.tree for layout in layouts.items]
        self.offset = _prediction_offset(self.trees)
        self.policy, self.z, self.balance = torch.zeros(3, len(layouts), dtype=torch.float64)
        """Of each microbatch, router statistics times their share of the step's semantic tokens, [K]."""
        self.logprobs = torch.zeros(int(self.offset[-1]), dtype=torch.float64)
        self.entropy: Tensor | None = None
        self.expert_load: Tensor | None = None

    def watched(self, number: int, forward: Callable[[], CompactOutputs], restore: Callable[..., Any]) -> Pass:
        """The pass of a microbatch, whose numbers are kept."""
        share = int(self.trees[number].columns.offset[-1]) / self.step.semantic_tokens
        each = 1.0 / self.step.semantic_tokens

        def run() -> CompactOutputs:
            outputs = forward()
            self._add_routers(number, outputs, each, share)
            return outputs

        def loss(outputs: CompactOutputs) -> Tensor:
            return self._policy_of(number, restore(outputs))

        return Pass(run, loss, self._coefficient("router_z") * each, self._coefficient("router_balance") * share)

    def _policy_of(self, number: int, restored: SemanticOutputs) -> Tensor:
        columns = self.trees[number].columns
        policy = self.objective.loss(LossTerms(restored.logprobs, restored.entropy, columns, self.step))
        if self.split.leads:
            self.policy[number] = policy.detach()
            place = self._place(number)
            self.logprobs[place] = _host(restored.logprobs)
            if restored.entropy is not None:
                self.entropy = torch.zeros_like(self.logprobs) if self.entropy is None else self.entropy
                self.entropy[place] = _host(restored.entropy)
        return policy

    def _place(self, number: int) -> Tensor:
        """Where a microbatch's predictions are in the caller's order."""
        key = self.trees[number].key
        return torch.from_numpy(ranges(self.offset[key], self.offset[key + 1]))

    def _add_routers(self, number: int, outputs: CompactOutputs, each: float, share: float) -> None:
        if outputs.expert_load is None:
            return
        load = _host(outputs.expert_load)
        self.expert_load = load if self.expert_load is None else self.expert_load + load
        self.z[number] = each * _host(outputs.router_z)
        self.balance[number] = share * _host(outputs.router_balance)

    def _coefficient(self, loss: str) -> float:
        """Of a router loss; 0 in a step that trains nothing, whose loss and gradients are exactly 0."""
        given: float = getattr(self.config, f"{loss}_coefficient")
        return given if self.step.trained_tokens else 0.0

    def gather(self, total: Callable[[Tensor], Tensor]) -> None:
        """Sum over processes.

        Args:
            total: sums a tensor on the host over all processes, in place.

        Raises:
            HartsError: a loss is not finite; on every process alike.
        """
        if total(torch.tensor(float(self.entropy is not None))) and self.entropy is None:
            self.entropy = torch.zeros_like(self.logprobs)
        found = (self.policy, self.z, self.balance, self.logprobs, self.entropy, self.expert_load)
        for each in found:
            if each is not None:
                total(each)
        loss = self.policy + self._coefficient("router_z") * self.z + self._coefficient("router_balance") * self.balance
        bad = (~loss.isfinite()).nonzero()[:, 0].tolist()
        if bad:
            value, share = float(loss[bad[0]]), float(self.policy[bad[0]])
            raise HartsError(f"microbatch {bad[0]}: the loss is {value}, of it the objective {share}")

    def result(self, norm: float, seconds: float) -> StepResult:
        """The step's numbers."""
        policy, z, balance = (float(each.sum()) for each in (self.policy, self.z, self.balance))
        routed = self.expert_load is not None
        return StepResult(
            loss=policy + self._coefficient("router_z") * z + self._coefficient("router_balance") * balance,
            policy_loss=policy,
            router_z=z if routed else None,
            router_balance=balance if routed else None,
            logprobs=self.logprobs.numpy(),
            entropy=None if self.entropy is None else self.entropy.numpy(),
            offset=self.offset,
            expert_load=self.expert_load,
            trained_tokens=self.step.trained_tokens,
            gradient_norm=norm,
            seconds=seconds,
        )


def _prediction_offset(trees: list[SegmentTree]) -> Int64:
    """Predictions of trajectory i of the caller's batch begin at the i-th, [N + 1]."""
    count = np.empty(sum(len(tree.key) for tree in trees), dtype=np.int64)
    for tree in trees:
        count[tree.key] = tree.columns.length - 1
    return offsets(count)


def _host(values: Any) -> Tensor:
    return torch.as_tensor(values).detach().double().cpu()
