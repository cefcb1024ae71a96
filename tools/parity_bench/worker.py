"""What every process of a topology runs: the same steps, and its part of what came out, in a file."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from harts import Pipeline
from harts.ir import CompactLayout, PerMicrobatch
from harts.ir.codec import load
from harts.train.compare import Trainer
from parity_bench.host import on_host


def work(folder: Path) -> None:
    """Run all jobs of a folder in this process, which `torchrun` started or which is alone.

    Args:
        folder: with `jobs.json`: a list of {"name", "file", "overrides", "layouts", "replicas", "ones"}.
    """
    jobs: list[dict[str, Any]] = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    for job in jobs:
        with nullcontext() if torch.cuda.is_available() else on_host():
            found = _run(job)
            target = folder / job["name"]
            target.mkdir(exist_ok=True)
            torch.save(found, target / f"{rank}.pt")
            _leave()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _leave() -> None:
    from megatron.core import parallel_state  # noqa: PLC0415  (heavy)

    distributed.barrier()
    parallel_state.destroy_model_parallel()  # the processes stay together: to meet again can block


def _run(job: dict[str, Any]) -> dict[str, Any]:
    pipeline = Pipeline.load(job["file"], job["overrides"])
    model: Any = pipeline.env.model
    layouts = _layouts(job)
    objective: Any = pipeline.settings.components["train.objective"]
    config: Any = pipeline.settings.train
    trainer = Trainer(pipeline.stage("execute"), pipeline.stage("restore"), objective.cls(objective.config), config)
    steps = []
    for result in trainer.steps(layouts):
        steps.append(
            {
                "loss": result.loss,
                "gradient_norm": result.gradient_norm,
                "load": result.expert_load,
                "logprobs": torch.from_numpy(result.logprobs),
                "entropy": torch.from_numpy(result.entropy),
                "z": result.router_z,
                "balance": result.router_balance,
                "gradients": _gradients(model),
            }
        )
    weights = [(part, each.detach()) for part, each in _parts(model)]
    return {"steps": steps, "weights": weights, "bias": _biases(model)}


def _layouts(job: dict[str, Any]) -> PerMicrobatch[CompactLayout]:
    """The planned step, split over as many replicas as the topology has."""
    made: Any = load(job["layouts"])
    layouts: PerMicrobatch[CompactLayout] = replace(made, step=replace(made.step, replicas=job["replicas"]))
    if not job["ones"]:
        return layouts
    items = tuple(
        replace(each, multiplicity=(each.multiplicity > 0).astype(each.multiplicity.dtype)) for each in layouts.items
    )
    return replace(layouts, items=items)


def _parts(model: Any) -> list[tuple[Any, torch.nn.Parameter]]:
    from harts.backends.model.megatron.parts import parts_of  # noqa: PLC0415  (heavy)

    return list(parts_of(model.module, model.config, model.made.groups))


def _gradients(model: Any) -> list[tuple[Any, torch.Tensor]] | None:
    """None where a process has a range of them only."""
    if model.config.parallel.distributed_optimizer:
        return None
    attribute = "grad" if model.parallel is None else "main_grad"
    return [(part, getattr(each, attribute).detach().clone()) for part, each in _parts(model)]


def _biases(model: Any) -> dict[int, torch.Tensor]:
    from harts.backends.model.megatron.run import routers_of  # noqa: PLC0415  (heavy)

    routers = routers_of(model.module).items()
    return {number: router.expert_bias.clone() for number, router in routers if router.expert_bias is not None}
