"""Trajectories as they came: tokens, and the RL columns beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from harts.ir.base import Bool, Dims, Float64, Int32, Int64, Invariant, Value
from harts.ir.runs import offsets

TRAJECTORY_COLUMNS = ("reward", "advantage", "weight", "temperature")
TOKEN_COLUMNS = ("loss_mask", "advantages", "old_logprobs", "ref_logprobs", "weights", "temperatures")


@dataclass(frozen=True, eq=False, repr=False)
class Columns(Value):
    """RL columns of N trajectories with S tokens in all, flat and token-aligned: entry t is about token t.

    The first token of a trajectory has no log-prob, so its entries are never read. A column that the data does not
    hold is None. `advantage`, `weight` and `temperature` hold one value a trajectory; the plural forms hold one a
    token and exclude the singular one.
    """

    kind = "columns"

    names: tuple[str, ...]
    """Trajectory ids, unique, N of them."""
    groups: tuple[str, ...]
    """Prompt-group names."""
    offset: Annotated[Int64, Dims("N+1")]
    """Tokens of trajectory i are offset[i]:offset[i+1]."""
    group: Annotated[Int32, Dims("N")]
    """Index into `groups`."""
    loss_mask: Annotated[Bool, Dims("S")]
    """True on tokens that are trained."""
    reward: Annotated[Float64 | None, Dims("N")] = None
    advantage: Annotated[Float64 | None, Dims("N")] = None
    advantages: Annotated[Float64 | None, Dims("S")] = None
    old_logprobs: Annotated[Float64 | None, Dims("S")] = None
    """Log-probs under the policy that sampled, in nats."""
    ref_logprobs: Annotated[Float64 | None, Dims("S")] = None
    """Log-probs under the reference policy, in nats."""
    weight: Annotated[Float64 | None, Dims("N")] = None
    weights: Annotated[Float64 | None, Dims("S")] = None
    """Factor on each token's loss term."""
    temperature: Annotated[Float64 | None, Dims("N")] = None
    temperatures: Annotated[Float64 | None, Dims("S")] = None
    """Sampling temperature; logits are divided by it. None is 1."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def length(self) -> Int64:
        """Tokens of each trajectory, [N]."""
        return np.diff(self.offset)

    def per_token(self, name: str) -> Float64 | None:
        """`advantage`, `weight` or `temperature` as one value a token, [S]; None if the data has neither form."""
        plural: Float64 | None = getattr(self, name + "s")
        single: Float64 | None = getattr(self, name)
        if plural is not None or single is None:
            return plural
        return np.repeat(single, self.length)

    def predicted(self) -> Int64:
        """Index of every predicted token in the token-aligned columns: all but the trajectories' first, [S - N].

        Log-probs come in this order: `advantages[columns.predicted()]` lines up with them.
        """
        inner = np.ones(int(self.offset[-1]), dtype=np.bool_)
        inner[self.offset[:-1]] = False
        return np.flatnonzero(inner).astype(np.int64)

    def locate(self, token: int) -> str:
        """Name a token of the flat columns: its trajectory and its index there."""
        trajectory = int(np.searchsorted(self.offset, token, side="right")) - 1
        return f"trajectory {self.names[trajectory]!r}, token {token - self.offset[trajectory]}"

    def take(self, members: Int64) -> Columns:
        """The columns of some trajectories, in the order given."""
        spans = [slice(a, b) for a, b in zip(self.offset[members], self.offset[members + 1], strict=True)]
        picked: dict[str, object] = {
            "names": tuple(self.names[i] for i in members),
            "offset": offsets(self.length[members]),
            "group": self.group[members],
        }
        for name in TRAJECTORY_COLUMNS + TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None and name in TRAJECTORY_COLUMNS:
                picked[name] = column[members]
            elif column is not None:
                picked[name] = np.concatenate([column[span] for span in spans])
        return replace(self, **picked)  # type: ignore[arg-type]

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("names", len(self.names) != len(self.group), "there must be one name a trajectory")
        yield Invariant("names", len(set(self.names)) != len(self.names), "names must be unique")
        yield Invariant("offset", self.offset[:1] != 0, "offsets must start at 0")
        yield Invariant("offset", self.length <= 0, "a trajectory must have at least one token")
        yield Invariant("offset", self.offset[-1] != len(self.loss_mask), "offsets must end at the token count")
        yield Invariant("group", (self.group < 0) | (self.group >= len(self.groups)), "must index groups")
        for name in ("advantage", "weight", "temperature"):
            both = getattr(self, name) is not None and getattr(self, name + "s") is not None
            yield Invariant(name, both, f"excludes {name}s")


@dataclass(frozen=True, eq=False, repr=False)
class RolloutBatch(Value):
    """All trajectories of one training step in the caller's order."""

    kind = "rollout_batch"

    source: str
    """Where they came from: a path, or a word for data that was handed over."""
    tokens: Annotated[Int32, Dims("S")]
    columns: Columns

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("tokens", self.tokens < 0, "a token id must not be negative")
        yield Invariant("tokens", len(self.tokens) != self.columns.offset[-1], "must be as many as the columns say")
