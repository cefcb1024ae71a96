"""Ranks with different plans all raise, before anything can hang."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harts.errors import HartsError, InputError
from harts.ir import CompactLayout, PerMicrobatch
from harts.train.agreement import agree, planned_together
from tests.forests import paths_of, trie_of
from tests.stages.restore.layouts import layout_of
from tests.train.rig import layouts_of

PATHS = paths_of([(-1, 9), (0, 4), (0, 5)])


def step_of(how: str) -> PerMicrobatch[CompactLayout]:
    """The same step but for one thing."""
    if how.startswith("fails"):
        raise InputError(f"rollouts.jsonl: {how}")
    paths = [[*PATHS[0][:-1], 12], *PATHS[1:]] if how == "tokens" else PATHS
    layouts: PerMicrobatch[CompactLayout] = layouts_of(trie_of(paths), [range(len(paths))])
    if how == "source":
        return replace(layouts, step=replace(layouts.step, source="elsewhere"))
    if how == "chunk size":
        tree = layouts.items[0].plan.tree
        changed = layout_of(tree)
        return replace(layouts, items=(replace(changed, plan=replace(changed.plan, chunk_size=3)),))
    return layouts


def rank_main(rank: int, store: str, how: str, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        agree(planned_together(lambda: step_of(how)))
        answers.put((rank, None))
    except HartsError as error:
        answers.put((rank, str(error)))
    finally:
        dist.destroy_process_group()


def run_ranks(tmp_path: Path, hows: tuple[str, str]) -> dict[int, str | None]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, str(tmp_path / "store"), how, answers))
        for rank, how in enumerate(hows)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return found


def test_equal_plans_pass_wherever_the_rollouts_were_read(tmp_path):
    assert run_ranks(tmp_path, ("same", "source")) == {0: None, 1: None}


@pytest.mark.parametrize("how", ["tokens", "chunk size"])
def test_different_plans_raise_on_every_rank_with_both_digests(tmp_path, how):
    found = run_ranks(tmp_path, ("same", how))
    for message in found.values():
        assert message is not None
    digests = [message.split(": ")[1] for message in found.values() if message]
    assert digests[0].count(" on 1 ranks") == 2
    assert digests[0].split("; rank")[0] == digests[1].split("; rank")[0]


def test_what_fails_on_every_rank_is_told_as_it_is(tmp_path):
    assert run_ranks(tmp_path, ("fails", "fails")) == dict.fromkeys((0, 1), "rollouts.jsonl: fails")


@pytest.mark.parametrize("hows", [("same", "fails"), ("fails here", "fails there")])
def test_what_fails_on_some_ranks_fails_on_all_with_every_message(tmp_path, hows):
    found = run_ranks(tmp_path, hows)
    failed = [f"rank {rank}: rollouts.jsonl: {how}" for rank, how in enumerate(hows) if how != "same"]
    text = "\n".join([f"planning failed on {len(failed)} of 2 ranks", *failed])
    assert found == {0: text, 1: text}
