"""Megatron's router with the statistics of the semantic positions (SPEC section 6, equation 20).

Routing, dispatch and experts see compact rows as they are. Shape suffixes: R compact rows, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from harts.backends.model.megatron.call import TreeParams, attach
from harts.backends.model.moe import Routing, statistics
from harts.backends.model.norm import widen
from harts.errors import BackendError

OUTSIDE = object()
"""The call of a router that no layer has given one."""


class TreeRouter(TopKRouter):  # type: ignore[misc]  # megatron has no types
    """Megatron hands no plan to it: its layer says in which call it runs."""

    call: Any = OUTSIDE

    @contextmanager
    def running(self, packed_seq_params: Any) -> Iterator[None]:
        """While the layer runs: in a call with a plan, or in one of Megatron's own."""
        before, self.call = self.call, packed_seq_params if isinstance(packed_seq_params, TreeParams) else None
        try:
            yield
        finally:
            self.call = before

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
        q = self.call.plan.multiplicity
        # like Megatron's, the balance loss looks at choices without the selection bias, the load at those with it
        found = statistics(rows, Routing(scores.topk(self.topk, dim=1).indices, probs, scores), q)
        found = found._replace(load=q.to(rows.dtype) @ routing_map.to(rows.dtype))
        return attach(probs, found, self.layer_number, self.call), routing_map
