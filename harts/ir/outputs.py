"""What execution and restoration hand on. Tensors keep their autograd graph; a dump keeps their values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harts.ir.base import Invariant, TensorLike, Value
from harts.ir.layout import CompactLayout


@dataclass(frozen=True, eq=False, repr=False)
class CompactOutputs(Value):
    """Final hidden states of the compact rows, and the router statistics of the MoE layers (None without MoE)."""

    kind = "compact_outputs"

    layout: CompactLayout
    hidden: TensorLike
    """[R, hidden], after the final norm, before the LM head."""
    router_z: TensorLike | None = None
    """Sum over MoE layers and rows of q_c * logsumexp(router logits)^2; scalar."""
    router_balance: TensorLike | None = None
    """Sum over MoE layers of E * sum_e f_e * P_e with q_c-weighted f and P; scalar."""
    expert_load: TensorLike | None = None
    """q_c-weighted assignments of each expert, [MoE layers, E]; no gradient."""

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        short = self.hidden.shape[0] != len(self.layout.input_ids)
        yield Invariant("hidden", short, "there must be one hidden state a row")


@dataclass(frozen=True, eq=False, repr=False)
class SemanticOutputs(Value):
    """Log-probs of every trajectory in the original order, autograd attached.

    Entries are flat, trajectory after trajectory in the microbatch's key order: a trajectory of n tokens has n - 1,
    entry i about its token i + 1.
    """

    kind = "semantic_outputs"

    outputs: CompactOutputs
    logprobs: TensorLike
    """Log-prob of each next token, in nats, [S - N]."""
    entropy: TensorLike | None = None
    """Entropy of the distribution that each next token was drawn from, in nats, [S - N]."""

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        columns = self.outputs.layout.plan.tree.columns
        wanted = int(columns.offset[-1]) - len(columns)
        yield Invariant("logprobs", tuple(self.logprobs.shape) != (wanted,), "there must be n - 1 a trajectory")
