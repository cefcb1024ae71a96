"""Four gloo processes that restore the same microbatches, their work split in several ways; one start for all cases."""

from __future__ import annotations

import multiprocessing
import random
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harts.backends.split import HeadSplit, Split
from harts.errors import BackendError
from harts.ir import CompactLayout, CompactOutputs
from harts.stages.restore.mapped import Mapped
from tests.forests import random_trajectories, tree_of
from tests.stages.restore.layouts import layout_of
from tests.stages.restore.plain import Largest

WORLD, WIDTH, BLOCK = 4, 5, 3
TIMEOUT = 300


class Case(NamedTuple):
    """One microbatch on some processes. The world holds several copies if they are fewer than four."""

    head: int
    """Processes that the vocabulary is split over."""
    positions: int
    """Processes that share positions."""
    shard: int
    """Rows of the LM head of each process, as far as they reach."""
    dtype: torch.dtype = torch.float64
    entropy: bool = True
    restored: Literal["all", "trained"] = "all"
    mask: Literal["all", "some", "none"] = "all"
    paths: Literal["random", "pair"] = "random"
    vocabulary: int = 41
    shift: int = 0
    """Added to all logits, which are then integers."""
    outside: bool = False
    """Whether a token is outside the vocabulary."""


class Restored(NamedTuple):
    """What one process got."""

    logprobs: Tensor
    entropy: Tensor | None
    d_hidden: Tensor
    d_head: Tensor
    forward: list[int]
    """Elements of each collective."""
    backward: list[int]
    largest: int
    """Elements of the largest tensor of forward and backward."""


def microbatch(case: Case) -> CompactLayout:
    """Tokens are spread over the whole vocabulary; trajectories of a random tree have different temperatures."""
    rng = random.Random(3)
    paths = random_trajectories(rng, chunk=4) if case.paths == "random" else [[1, 2]]
    paths = [[(token * 7 + 3) % 41 * (case.vocabulary // 41) for token in path] for path in paths]
    if case.outside:
        paths[-1].append(case.vocabulary)
    count = sum(map(len, paths))
    draw = np.random.default_rng(4)
    mask = {"all": np.ones(count, np.bool_), "some": draw.random(count) < 0.4, "none": np.zeros(count, np.bool_)}
    mask = mask[case.mask]
    mask[np.cumsum([0, *map(len, paths)])[:-1]] = False
    heat = np.array([1.0, 0.5])[np.arange(len(paths)) % 2]
    return layout_of(tree_of(paths, temperature=heat, loss_mask=mask), padding=2)


def inputs(case: Case, layout: CompactLayout) -> tuple[Tensor, Tensor]:
    """Hidden states [R, h] and the whole LM head [V, h]."""
    draw = torch.Generator().manual_seed(5)
    make = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(case.dtype)  # noqa: E731
    hidden, weight = make(len(layout.input_ids), WIDTH), make(case.vocabulary, WIDTH) * 3
    if case.shift:
        hidden, weight = hidden.round(), weight.round()
        hidden[:, 0], weight[:, 0] = 1, case.shift
    return hidden, weight


def loss_of(logprobs: Tensor, entropy: Tensor | None, layout: CompactLayout) -> Tensor:
    """Reads trained positions alone."""
    columns = layout.plan.tree.columns
    trained = torch.from_numpy(columns.loss_mask[columns.predicted()])
    factors = torch.randn(2, len(trained), generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    factors = factors.to(logprobs.dtype)[:, trained]
    loss = (logprobs[trained] * factors[0]).sum()
    return loss if entropy is None else loss + (entropy[trained] * factors[1]).sum()


def shard_of(case: Case, place: int) -> tuple[int, int]:
    """First token id and number of rows of the place-th process of a head's group."""
    first = min(place * case.shard, case.vocabulary)
    return first, min(case.shard, case.vocabulary - first)


def restore_here(case: Case, rank: int, groups: dict[tuple[int, ...], Any], seen: list[int]) -> Restored:
    """This process's part. Processes of a head's group are neighbours."""
    layout = microbatch(case)
    hidden, weight = inputs(case, layout)
    base = rank - rank % (case.head * case.positions)
    head_place, position_place = rank % case.head, (rank - base) // case.head
    first, rows = shard_of(case, head_place) if case.head > 1 else (0, case.vocabulary)
    hidden, weight = hidden.requires_grad_(), weight[first : first + rows].clone().requires_grad_()
    neighbours = tuple(base + position_place * case.head + i for i in range(case.head))
    across = tuple(base + i * case.head + head_place for i in range(case.positions))
    split = Split(
        head=HeadSplit(groups[neighbours], first) if case.head > 1 else None,
        positions=groups[across] if case.positions > 1 else None,
    )
    model = SimpleNamespace(head_weight=lambda: weight, vocabulary=case.vocabulary, split=split)
    config = Mapped.Config(rows_per_block=BLOCK, entropy=case.entropy, positions=case.restored)
    stage = Mapped(config, SimpleNamespace(model=model))
    seen.clear()
    with Largest() as sizes:
        out = stage.run(CompactOutputs(layout, hidden))
        forward = list(seen)
        loss = loss_of(out.logprobs, out.entropy, layout)
        seen.clear()
        d_hidden, d_head = torch.autograd.grad(loss, (hidden, weight))
    entropy = None if out.entropy is None else out.entropy.detach()
    return Restored(out.logprobs.detach(), entropy, d_hidden, d_head, forward, list(seen), sizes.elements)


def _rank_main(rank: int, store: str, cases: list[Case], answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
        groups = {members: dist.new_group(members) for members in [*pairs, tuple(range(WORLD))]}
        seen: list[int] = []
        real = dist.all_reduce

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(tensor.numel())
            return real(tensor, *args, **kwargs)

        dist.all_reduce = recorded
        found: list[Any] = []
        for case in cases:
            try:
                found.append(restore_here(case, rank, groups, seen))
            except BackendError as error:
                found.append((str(error), list(seen)))
        torch.save(found, f"{store}.{rank}")
        answers.put((rank, None))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


def restore_everywhere(folder: Path, cases: list[Case]) -> dict[Case, list[Any]]:
    """What each of the four processes got of each case: `Restored`, or the message of an error and its collectives."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, str(folder / "store"), cases, answers)) for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        rank, failure = answers.get(timeout=TIMEOUT)
        assert failure is None, f"process {rank}:\n{failure}"
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    found = [torch.load(folder / f"store.{rank}", weights_only=False) for rank in range(WORLD)]
    return dict(zip(cases, map(list, zip(*found, strict=True)), strict=True))
