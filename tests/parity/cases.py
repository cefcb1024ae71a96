"""The forests and models that parity is swept over. Everything is derived from the case's number."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np

from harts.ir import RolloutBatch
from tests.forests import Spec, batch_of, paths_of, random_spec, random_trajectories

CHUNK = 8
VOCABULARY = 40


@dataclass(frozen=True)
class Case:
    """One forest, one model, one way to cut it into microbatches."""

    number: int
    rule: str
    attention: str
    feed_forward: str
    recompute: str
    replicas: int
    split: bool

    def __str__(self) -> str:
        cut = "split" if self.split else "whole"
        return f"{self.number}-{self.rule}-{self.attention}-{self.feed_forward}-{self.recompute}-D{self.replicas}-{cut}"

    def batch(self) -> RolloutBatch:
        rng = random.Random(self.number)
        return with_columns(rng, _trajectories(rng, self.number))


MODELS = list(itertools.product(("kda", "gdn"), ("mla", "gqa"), ("dense", "softmax", "sigmoid"), ("none", "full")))


def cases(count: int) -> list[Case]:
    """Cycle through all 24 models; cutting and replicas vary with the number."""
    found = []
    for number in range(count):
        rule, attention, feed_forward, recompute = MODELS[number % len(MODELS)]
        found.append(Case(number, rule, attention, feed_forward, recompute, 1 + number % 2, number % 3 == 0))
    return found


def _trajectories(rng: random.Random, number: int) -> list[list[int]]:
    kind = number % 5
    if kind == 0:
        return paths_of(every_fork_offset(number // 5 % (2 * CHUNK) + 1))
    if kind == 1:
        return paths_of(deep(rng, depth=rng.randint(7, 10)))
    if kind == 2:
        spec = random_spec(rng, CHUNK, roots=1, forks=3)
        prefixes = [(v, rng.randint(1, spec[v][1])) for v in range(len(spec))]
        return paths_of(spec, prefixes)
    return random_trajectories(rng, CHUNK, roots=rng.randint(1, 3), forks=rng.randint(1, 5))


def every_fork_offset(length: int) -> Spec:
    """A trunk that forks right after `length` tokens; one branch forks again, into single tokens."""
    return [(-1, length), (0, 1), (0, CHUNK), (0, 2 * CHUNK + 1), (1, 1), (1, CHUNK - 1), (4, 1), (4, 1)]


def deep(rng: random.Random, depth: int) -> Spec:
    """A chain of forks, most segments of one token."""
    spec: list[tuple[int, int]] = [(-1, rng.randint(1, CHUNK + 1))]
    trunk = 0
    for _ in range(depth):
        spec.append((trunk, rng.choice((1, 1, 2, CHUNK))))
        spec.append((trunk, rng.choice((1, 1, 3, CHUNK + 1))))
        trunk = len(spec) - rng.choice((1, 2))
    return spec


def with_columns(rng: random.Random, trajectories: list[list[int]]) -> RolloutBatch:
    """Add two duplicates and every RL column; about a fifth of the trajectories is fully masked."""
    trajectories = [*trajectories, list(trajectories[0]), [rng.randint(1, VOCABULARY - 1)]]
    total = sum(map(len, trajectories))
    random_state = np.random.default_rng(rng.randrange(2**32))
    mask = random_state.random(total) < 0.6
    start = 0
    for tokens in trajectories:
        if rng.random() < 0.2:
            mask[start : start + len(tokens)] = False
        start += len(tokens)
    return batch_of(
        trajectories,
        loss_mask=mask,
        advantage=random_state.normal(size=len(trajectories)),
        old_logprobs=-random_state.random(total) * 4 - 1.0,
        ref_logprobs=-random_state.random(total) * 4 - 1.0,
        weights=random_state.random(total) + 0.5,
        temperatures=random_state.choice([0.7, 1.0, 1.3], size=total),
    )
