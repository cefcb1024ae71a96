"""A model of one embedding whose hidden states depend on token and position, and steps split by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harts.backends.base import Model, ModelOutput, Need
from harts.backends.plan_tensors import PlanTensors
from harts.ir import CompactLayout, CompactOutputs, CompactTrie, PerMicrobatch, StepPlan
from harts.stages.restore.mapped import Mapped
from harts.stages.schedule.segments import segment_tree
from harts.train.config import TrainConfig
from harts.train.objectives import Objective
from harts.train.step import run_step
from harts.train.totals import StepResult
from tests.stages.restore.layouts import flat_tree, layout_of

VOCABULARY, WIDTH, EXPERTS = 24, 5, 3


class Tiny(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        make = lambda *shape: nn.Parameter(torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype))  # noqa: E731
        self.embedding, self.head, self.router = make(VOCABULARY, WIDTH), make(VOCABULARY, WIDTH), make(EXPERTS, WIDTH)
        self.register_buffer("bias", torch.zeros(1, EXPERTS, dtype=torch.float64))


class FakeModel(Model):
    """`FakeExecute` runs it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(None)
        self.module: Tiny = Tiny(dtype)

    def need(self, chunk_size: int) -> Need:
        raise NotImplementedError

    def forward(self, plan: PlanTensors) -> ModelOutput:
        raise NotImplementedError

    def head_weight(self) -> Tensor:
        return self.module.head

    def update_expert_bias(self, load: Tensor) -> None:
        self.module.bias += torch.sign(load.mean() - load)


class FakeExecute:
    """Router statistics are weighted by multiplicity; a fault to plant multiplies what it is told to."""

    def __init__(self, dtype: torch.dtype = torch.float64, moe: bool = False, fault: str = "") -> None:
        self.env = SimpleNamespace(model=FakeModel(dtype), device="cpu", dtype=dtype)
        self.moe, self.fault = moe, fault

    def run(self, layout: CompactLayout) -> CompactOutputs:
        module = self.env.model.module
        ids = torch.from_numpy(layout.input_ids.astype(np.int64))
        phase = torch.from_numpy(np.cos(layout.position_ids)).to(module.head.dtype)
        hidden = torch.tanh(module.embedding[ids] + phase[:, None])
        if self.fault == "hidden" and layout.rows < layout.plan.tree.semantic_tokens:
            hidden = hidden * 1.001
        if not self.moe:
            return CompactOutputs(layout, hidden)
        count = torch.tensor(layout.multiplicity).to(hidden.dtype)
        if self.fault == "multiplicity":
            count = (count > 0).to(hidden.dtype)
        logits = hidden @ module.router.T
        chosen = nn.functional.one_hot(logits.argmax(1), EXPERTS).to(hidden.dtype)
        load = (count[:, None] * chosen).sum(0)
        mass = (count[:, None] * logits.softmax(1)).sum(0)
        z = (count * logits.logsumexp(1).square()).sum()
        balance = EXPERTS * (load * mass).sum() / count.sum() ** 2
        return CompactOutputs(layout, hidden, z, balance, load.detach()[None])


def layouts_of(trie: CompactTrie, split: Sequence[Sequence[int]], replicas: int = 1, flat: bool = False) -> Any:
    """A step whose microbatches hold these trajectories of the batch."""
    place = np.empty(len(trie.order), dtype=np.int64)
    place[trie.order] = np.arange(len(trie.order))
    trees = [segment_tree(trie, np.sort(place[list(members)])) for members in split]
    microbatch = np.empty(len(place), dtype=np.int32)
    for number, members in enumerate(split):
        microbatch[list(members)] = number
    work = np.array([len(tree.tokens) for tree in trees], dtype=np.int64)
    trained = trie.loss_mask.copy()
    trained[trie.batch.columns.offset[:-1]] = False
    per = np.add.reduceat(trained, trie.batch.columns.offset[:-1])
    step = StepPlan(
        source="test",
        capacity=None,
        replicas=replicas,
        microbatch=microbatch,
        work=work,
        cost=work,
        unit="compact tokens",
        objective="paper",
        lower_bound=trie.compact_tokens,
        candidates=("by hand",),
        scores=np.array([[work.sum()] * 3], dtype=np.int64),
        chosen=0,
        semantic_tokens=trie.semantic_tokens,
        compact_tokens=trie.compact_tokens,
        trained_tokens=int(trained.sum()),
        trained_trajectories=int((per > 0).sum()),
    )
    return PerMicrobatch(step, tuple(layout_of(flat_tree(tree) if flat else tree) for tree in trees))


def restore_of(execute: FakeExecute, **config: Any) -> Mapped:
    return Mapped(Mapped.Config(**{"rows_per_block": 100} | config), execute.env)


CONFIG = TrainConfig(learning_rate=0.1, optimizer="sgd")


def step_of(
    trie: CompactTrie, split: Sequence[Sequence[int]], objective: Objective, config: TrainConfig = CONFIG, **how: Any
) -> tuple[StepResult, dict[str, Tensor]]:
    """One step of a fresh model, and its gradients."""
    execute = FakeExecute(moe=how.pop("moe", False))
    restore = restore_of(execute, entropy=how.pop("entropy", False))
    result = run_step(layouts_of(trie, split, **how), execute, restore, objective, config)
    named = execute.env.model.module.named_parameters()
    return result, {name: each.grad for name, each in named if each.grad is not None}
