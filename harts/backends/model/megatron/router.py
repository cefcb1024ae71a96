"""Megatron's router with the statistics of the semantic positions (SPEC section 6, equation 20).

Routing, dispatch and experts see compact rows as they are. Shape suffixes: R compact rows, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, distributed

from harts.backends.model.invariant import linear
from harts.backends.model.megatron.call import TreeParams, attach
from harts.backends.model.moe import Routing, statistics, weighted
from harts.backends.model.norm import widen
from harts.errors import BackendError

OUTSIDE = object()
"""The call of a router that no layer has given one."""


class TreeRouter(TopKRouter):  # type: ignore[misc]  # megatron has no types
    """Megatron hands no plan to it: its layer says in which call it runs.

    Statistics come back with the call. Losses that Megatron's configuration has coefficients for, and the counts by
    which Megatron moves the selection bias, are weighted as well: they serve training loops of Megatron.
    """

    call: Any = OUTSIDE

    @contextmanager
    def running(self, packed_seq_params: Any) -> Iterator[None]:
        """While the layer runs: in a call with a plan, or in one of Megatron's own."""
        before, self.call = self.call, packed_seq_params if isinstance(packed_seq_params, TreeParams) else None
        try:
            yield
        finally:
            self.call = before

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., E] of rows [..., hidden], which no other row changes in a call with a plan."""
        if not isinstance(self.call, TreeParams):
            stock: Tensor = super().gating(input)
            return stock
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return linear(input, self.weight, self.bias, dtype)

    def routing(self, logits: Tensor, *given: Any, **others: Any) -> tuple[Tensor, Tensor]:
        """Route.

        Args:
            logits: [R, 1, E] in a call with a plan.
            given: of Megatron's own router.
            others: of Megatron's own router.

        Returns:
            Weights and which they are of, both [R, E].

        Raises:
            BackendError: it runs where its layer does not, so it cannot know how often a row counts.
        """
        if self.call is OUTSIDE:
            where = "recomputation of experts alone has no multiplicities"
            raise BackendError(f"layer {self.layer_number}: its router runs outside the layer's forward pass: {where}")
        probs, routing_map = super().routing(logits, *given, **others)
        if self.call is None:
            return probs, routing_map
        rows = widen(logits.reshape(-1, logits.shape[-1]))
        _, scores = compute_routing_scores_for_aux_loss(rows, self.topk, self.score_function)
        q = self.call.multiplicity
        # like Megatron's, the balance loss looks at choices without the selection bias, the load at those with it
        found = statistics(rows, Routing(scores.topk(self.topk, dim=1).indices, probs, scores), q, self._total)
        found = found._replace(load=weighted(q, routing_map.to(rows.dtype)))
        # experts compute padding rows too, a few at most: Megatron counts on as many choices of every row. Their weight
        # is 0, so nothing comes of them, and no gradient goes into an expert
        return attach(probs * (q > 0)[:, None], found, self.layer_number, self.call), routing_map

    def _total(self, counts: Tensor) -> Tensor:
        """Sum over the processes that have other rows of the microbatch."""
        if self.tp_cp_group.size() > 1:
            distributed.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def apply_z_loss(self, logits: Tensor, *given: Any, **others: Any) -> Tensor:
        """Attach Megatron's z-loss, a mean over semantic positions, to logits [R, E]."""
        if self.call is None:
            stock: Tensor = super().apply_z_loss(logits, *given, **others)
            return stock
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not (self.training and torch.is_grad_enabled()):
            return logits
        q = self.call.multiplicity
        coefficient /= self.tp_cp_group.size()
        loss = coefficient * (q * widen(logits).logsumexp(-1).square()).sum() / q.sum()
        attached: Tensor = self.attach_and_log_load_balancing_loss(
            logits, coefficient, loss, "z_loss", self.tp_cp_group, valid_token_count=q.sum()
        )
        return attached

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, **others: Any) -> Tensor:
        attached: Tensor = super()._apply_aux_loss(probs, *self._counted(scores, routing_map, others), **others)
        return attached

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, **others: Any) -> Tensor:
        attached: Tensor = super()._apply_global_aux_loss(probs, *self._counted(scores, routing_map, others), **others)
        return attached

    def _apply_seq_aux_loss(self, probs: Tensor, *given: Any, **others: Any) -> Tensor:
        if self.call is not None and self.get_aux_loss_coeff("seq_aux_loss"):
            raise BackendError(f"layer {self.layer_number}: seq_aux_loss: plans do not tell a trajectory's rows")
        attached: Tensor = super()._apply_seq_aux_loss(probs, *given, **others)
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, **others: Any) -> None:
        if self.call is None:
            super()._apply_expert_bias(routing_map, **others)
        elif self.enable_expert_bias and torch.is_grad_enabled():  # once: recomputation comes with gradients
            with torch.no_grad():
                self.local_tokens_per_expert += weighted(self.call.multiplicity, routing_map.float())

    def _counted(self, scores: Tensor, routing_map: Tensor, others: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Scores and choices as often as they count. Under a padding mask Megatron counts choices instead of rows."""
        if self.call is None:
            return scores, routing_map
        others["with_padding_mask"] = True
        q = self.call.multiplicity[:, None]
        return scores * q, routing_map * q
