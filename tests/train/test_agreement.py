"""Ranks with different plans all raise, before anything can hang."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from harts.errors import PlanError
from harts.ir import StepPlan
from harts.train.agreement import agree


def step_plan(work: int) -> StepPlan:
    return StepPlan(
        source="test",
        capacity=None,
        replicas=1,
        microbatch=np.zeros(2, dtype=np.int32),
        work=np.array([work], dtype=np.int64),
        candidates=("one",),
        scores=np.array([[work, work, work]], dtype=np.int64),
        chosen=0,
        semantic_tokens=9,
        compact_tokens=work,
        trained_tokens=3,
        trained_trajectories=1,
    )


def rank_main(rank: int, store: str, work: int, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        agree(step_plan(work))
        answers.put((rank, None))
    except PlanError as error:
        answers.put((rank, str(error)))
    finally:
        dist.destroy_process_group()


def run_ranks(tmp_path: Path, works: tuple[int, int]) -> dict[int, str | None]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, str(tmp_path / "store"), work, answers))
        for rank, work in enumerate(works)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return found


def test_equal_plans_pass(tmp_path):
    assert run_ranks(tmp_path, (5, 5)) == {0: None, 1: None}


def test_different_plans_raise_on_every_rank_with_both_digests(tmp_path):
    found = run_ranks(tmp_path, (5, 6))
    for message in found.values():
        assert message is not None
        assert step_plan(5).digest() in message
        assert step_plan(6).digest() in message
