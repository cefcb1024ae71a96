"""Run one case compactly and trajectory by trajectory, through the registered stages, and measure how far apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harts.backends.base import Env
from harts.backends.build import Prepared, build_env
from harts.ir import CompactLayout, PerMicrobatch
from harts.registry import resolve
from harts.stages.ingest.trie import build_trie
from harts.train.compare import Trainer
from harts.train.config import TrainConfig
from harts.train.differences import differences, gradient_errors
from harts.train.objectives import Objective
from harts.train.totals import StepResult
from tests.parity.cases import CHUNK, VOCABULARY, Case

CONV_WIDTH = 4
TRAIN = TrainConfig(
    steps=2, learning_rate=0.05, optimizer="sgd", router_z_coefficient=0.1, router_balance_coefficient=0.3
)
OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.05, "reduction": "token_mean"}),
    ("ppo", {"kl_coefficient": 0.2, "entropy_coefficient": 0.01, "reduction": "sequence_mean"}),
    ("sft", {"reduction": "constant", "denominator": 50.0}),
]


def build(kind: str, name: str, env: Env | None = None, **config: Any) -> Any:
    """A registered component from its name and config."""
    cls = resolve(kind, name)
    return cls(cls.Config(**config), env) if env is not None else cls(cls.Config(**config))


def objective(case: Case) -> Objective:
    name, config = OBJECTIVES[case.number % len(OBJECTIVES)]
    built: Objective = build("objectives", name, **config)
    return built


def model_config(case: Case) -> Any:
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "layers": 3,
        "pattern": "KAK",
        "rule": case.rule,
        "linear_heads": 1,
        "linear_value_heads": 2,
        "linear_key_dim": 8,
        "linear_value_dim": 4,
        "conv_width": CONV_WIDTH,
        "attention": case.attention,
        "heads": 2,
        "intermediate_size": 24,
        "recompute": case.recompute,
        "dtype": "float64",
        "seed": case.number,
        "init_std": 0.3,
    }
    if case.attention == "gqa":
        config |= {"kv_heads": 1, "head_dim": 8}
    else:
        config |= {"kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 6}
    if case.feed_forward != "dense":
        config["moe"] = {
            "experts": 4,
            "top_k": 2,
            "intermediate_size": 8,
            "shared_intermediate_size": 8,
            "scoring": case.feed_forward,
            "expert_bias_rate": 0.05,
            "dense_layers": 1,
        }
    return resolve("models", "reference").Config(**config)


def env_of(case: Case, linear: str) -> Env:
    parts = [resolve("models", "reference"), resolve("linear_attention", linear), resolve("full_attention", "sdpa")]
    return build_env(
        (parts[0], model_config(case)),
        (parts[1], parts[1].Config()),
        (parts[2], parts[2].Config()),
        Prepared(CHUNK, CONV_WIDTH),
        "cpu",
    )


def layouts_of(case: Case, call_plan: str, row_multiple: int = 1) -> PerMicrobatch[CompactLayout]:
    """The case's microbatches, planned by the registered stages."""
    trie = build_trie(case.batch(), "once" if case.number % 7 == 6 else "sum")
    capacity = max(int(trie.length.max()), trie.compact_tokens // 3) if case.split else None
    partitions = build("partition", "paper", capacity=capacity, replicas=case.replicas).run(trie)
    trees = build("schedule", "slots").run(partitions)
    plan = build("call_plan", call_plan, chunk_size=CHUNK)
    layout = build("layout", "round_major", conv_width=CONV_WIDTH, row_multiple=row_multiple)
    items = []
    for tree in trees.items:
        items.append(layout.run(plan.run(tree)))
        items[-1].verify()
    return PerMicrobatch(trees.step, tuple(items))


@dataclass(frozen=True)
class Run:
    """One step of one way to execute."""

    result: StepResult
    gradients: dict[str, Tensor]
    logits: Tensor
    """Of every semantic position, microbatch by microbatch, [S, vocabulary]."""


def runs(case: Case, layouts: PerMicrobatch[CompactLayout], linear: str = "naive") -> Iterator[Run]:
    """Train the case's two steps from its seed."""
    env = env_of(case, linear)
    execute = build("execute", "compact", env)
    restore = build("restore", "mapped", env, rows_per_block=50, entropy=True)
    trainer = Trainer(execute, restore, objective(case), TRAIN)
    logits = all_logits(execute, layouts)
    for result in trainer.steps(layouts):
        yield Run(result, {name: grad.clone() for name, grad in trainer.gradients().items()}, logits)
        logits = all_logits(execute, layouts)


def all_logits(execute: Any, layouts: PerMicrobatch[CompactLayout]) -> Tensor:
    parts = []
    with torch.no_grad():
        for layout in layouts.items:
            hidden = execute.run(layout).hidden
            parts.append((hidden @ execute.env.model.head_weight().T)[layout.semantic_map.rows()])
    return torch.cat(parts)


def faults(ours: Run, theirs: Run, tolerance: float) -> list[str]:
    """Everything in which two runs of one step differ by more than a relative tolerance."""
    found = differences(ours.result, theirs.result, gradient_errors(ours.gradients, theirs.gradients))
    faults = found.faults(tolerance)
    logits = float((ours.logits - theirs.logits).norm() / theirs.logits.norm())
    if not logits <= tolerance:
        faults.append(f"logits differ by a relative {logits:.2e}")
    return faults
