"""Random rollouts that share prefixes, with everything a GRPO step needs."""

from __future__ import annotations

import random
from typing import Any

VOCABULARY = 61
"""Of `pipeline.yaml`."""


def rollouts(seed: int, groups: int = 6, members: int = 5, length: int = 40) -> list[dict[str, Any]]:
    """Records for `harts.rollout_batch`: a tree a group, forks anywhere, a duplicate, a prefix and one token alone."""
    draw = random.Random(seed)

    def fresh(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    found = []
    for group in range(groups):
        paths = [fresh(draw.randrange(length // 2, length))]
        while len(paths) < members:
            parent = draw.choice(paths)
            kept = draw.randrange(1, len(parent))
            paths.append(parent[:kept] + fresh(draw.randrange(1, length - kept + 1)))
        paths += [list(paths[0]), paths[1][: max(1, len(paths[1]) // 2)], fresh(1)]
        for member, tokens in enumerate(paths):
            mask = [int(draw.random() < 0.7) for _ in tokens]
            record = {"id": f"{group}.{member}", "group": str(group), "tokens": tokens, "loss_mask": mask}
            found.append(record | {"advantage": draw.gauss(0.0, 1.0), "temperature": draw.choice([1.0, 0.7])})
    return found
