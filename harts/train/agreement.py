"""All ranks must hold the same plan before the first collective of a step; one that does not must not hang the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from harts.errors import HartsError, PlanError
from harts.ir import CompactLayout, PerMicrobatch


def several() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def planned_together(
    plan: Callable[[], PerMicrobatch[CompactLayout]], settings: Mapping[str, Any] | None = None
) -> PerMicrobatch[CompactLayout]:
    """Plan a step on every rank; if one fails, all do, before any of them waits for it elsewhere.

    Args:
        plan: plans on this rank.
        settings: sections of this rank that numbers depend on; they have to be alike on all ranks.

    Raises:
        HartsError: what this rank's plan failed with, if the others failed alike.
        PlanError: other ranks failed, or failed otherwise, each is named with its message; or settings differ.
    """
    if not several():
        return plan()
    error: HartsError | None = None
    try:
        made = plan()
    except HartsError as caught:
        error = caught
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (None if error is None else str(error), dict(settings or {})))
    texts = [text for text, _ in told]
    if error is not None and set(texts) == {str(error)}:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise PlanError("\n".join([f"planning failed on {len(failed)} of {len(texts)} ranks", *failed]))
    _check_settings([given for _, given in told])
    return made


def _check_settings(given: list[dict[str, Any]]) -> None:
    names = sorted({name for each in given for name in each})
    apart = [
        f"{name}: {each.get(name)} on rank {rank}, {given[0].get(name)} on rank 0"
        for name in names
        for rank, each in enumerate(given)
        if each.get(name) != given[0].get(name)
    ]
    if apart:
        raise PlanError("\n".join(["the ranks have different settings", *apart]))


def agree(layouts: PerMicrobatch[CompactLayout], group: dist.ProcessGroup | None = None) -> None:
    """Exchange the digests of a step's layouts; one collective.

    Everything counts that the ranks compute with: tokens, columns, chunk size, rounds, layout, membership, slots. Only
    the name of the rollouts' source does not, as ranks may read them from different places.

    Args:
        layouts: every microbatch of the step, as this rank planned it.
        group: the ranks that must agree; None is the default group.

    Raises:
        PlanError: on every rank alike, with all digests and how many ranks hold each.
    """
    mine = replace(layouts, step=replace(layouts.step, source="")).digest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, mine, group=group)
    if len(set(digests)) > 1:
        counts = ", ".join(f"{digest} on {count} ranks" for digest, count in sorted(Counter(digests).items()))
        raise PlanError(
            f"the ranks hold different plans of this step: {counts}; rank {dist.get_rank(group)} holds {mine}. "
            "Plan once and send the plan, or give every rank the same trajectories and settings."
        )
