"""All ranks must hold the same plan before the first collective of a step; one that does not must not hang the rest."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from harts.errors import PlanError
from harts.ir import Value

DIGEST_BYTES = 16


def agree(plan: Value, group: dist.ProcessGroup | None = None) -> None:
    """Exchange the digests of a plan; one collective of 16 bytes a rank.

    Args:
        plan: this rank's plan, usually the `StepPlan`.
        group: the ranks that must agree; None is the default group.

    Raises:
        PlanError: on every rank alike, with all digests and how many ranks hold each.
    """
    mine = plan.digest()
    sent = torch.frombuffer(bytearray.fromhex(mine), dtype=torch.uint8)
    received = [torch.empty(DIGEST_BYTES, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    digests = [bytes(each.tolist()).hex() for each in received]
    if len(set(digests)) > 1:
        counts = ", ".join(f"{digest} on {count} ranks" for digest, count in sorted(Counter(digests).items()))
        raise PlanError(
            f"the ranks hold different plans of this step: {counts}; rank {dist.get_rank(group)} holds {mine}. "
            "Plan once and send the plan, or give every rank the same trajectories and settings."
        )
