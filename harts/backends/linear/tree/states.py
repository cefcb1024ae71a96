"""The state recurrence of one execution: one launch for all rounds, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts.backends.linear.sizes import ceil_div, power_of_two
from harts.backends.linear.tree.rule import Rows, Rule
from harts.backends.linear.tree.schedule import Schedule
from harts.backends.linear.tree.state_kernels import backward_states_kernel, forward_states_kernel

KERNELS = (forward_states_kernel, backward_states_kernel)


class Walked(NamedTuple):
    """What a forward walk leaves of one buffer."""

    states: Tensor
    """State before each chunk, [chunks, HV, K, V]."""
    errors: Tensor
    """[T, HV, V]."""


class Recurrence:
    """States, errors and their gradients over the body and, if there are any, the heads."""

    def __init__(
        self,
        rule: Rule,
        schedule: Schedule,
        rows: Sequence[Rows],
        gates: Sequence[Tensor],
        walked: Sequence[Walked] | None = None,
    ) -> None:
        """Of each buffer: what the recurrence reads, its gates, and what a forward walk has left, if it has been."""
        self.rule, self.schedule = rule, schedule
        self.rows, self.gates = rows, gates
        value_heads = rows[0].w.shape[1]
        shape = value_heads, rule.key_dim, rule.value_dim
        self.chunk_shapes = [(grid.chunks, *shape) for grid in schedule.grids]
        self.walked = walked or [
            Walked(each.w.new_empty(size), torch.empty_like(each.u))
            for each, size in zip(rows, self.chunk_shapes, strict=True)
        ]

    def forward(self, bank: Tensor, *, write: bool) -> None:
        """Walk all sequences: states before chunks, and errors.

        Args:
            bank: all states, [S, HV, K, V].
            write: whether produced states are written, each before others start from it; else they are there already.
        """
        arguments = {
            "w": [each.w for each in self.rows],
            "u": [each.u for each in self.rows],
            "k": [each.k for each in self.rows],
            "g": self.gates,
            "errors": [each.errors for each in self.walked],
            "states": [each.states for each in self.walked],
        }
        self._launch(
            forward_states_kernel,
            arguments,
            bank=bank,
            done=self._counters(forward_states_kernel) if write else None,
            sequences=self.schedule.forward_order,
            given=self.schedule.given,
            WRITE=write,
        )

    def backward(self, dbank: Tensor | None, do: Sequence[Tensor], de: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Walk all sequences back; adds to `de` in place.

        Args:
            dbank: gradients of the bank's states from outside, [S, HV, K, V].
            do: gradients of the outputs, zeros on replay rows.
            de: gradients of the errors through the outputs of their own chunk.

        Returns:
            The gradient of the state after each chunk, and of the state that each sequence starts from, by place.
        """
        dstates = [each.w.new_empty(size) for each, size in zip(self.rows, self.chunk_shapes, strict=True)]
        dsource = self.gates[0].new_empty(self.schedule.places, *self.chunk_shapes[0][1:])
        arguments = {
            "q": [each.q for each in self.rows],
            "k": [each.k for each in self.rows],
            "w": [each.w for each in self.rows],
            "g": self.gates,
            "do": do,
            "de": de,
            "dstates": dstates,
        }
        self._launch(
            backward_states_kernel,
            arguments,
            dbank=dbank,
            dsource=dsource,
            done=self._counters(backward_states_kernel),
            consumers=self.schedule.consumers,
            sequences=self.schedule.backward_order,
            scale=self.rule.scale,
        )
        return dstates, dsource

    def _blocks(self, kernel: Any) -> int:
        return ceil_div(self.rule.value_dim, self.rule.launcher.config(kernel)["BV"])

    def _counters(self, kernel: Any) -> Tensor:
        """One counter a slot, value head and block of value channels."""
        size = self.schedule.slots * self.rows[0].w.shape[1] * self._blocks(kernel)
        return torch.zeros(size, dtype=torch.int32, device=self.gates[0].device)

    def _launch(self, kernel: Any, pairs: dict[str, Sequence[Tensor]], **arguments: Any) -> None:
        value_heads, heads = self.rows[0].w.shape[1], self.rows[0].k.shape[1]
        self.rule.launcher.run(
            kernel,
            (len(self.schedule.forward_order) * value_heads * self._blocks(kernel),),
            **{name: each[0] for name, each in pairs.items()},
            **{f"{name}_head": each[-1] for name, each in pairs.items()},
            **arguments,
            spans=self.schedule.spans,
            H=heads,
            HV=value_heads,
            K=self.rule.key_dim,
            V=self.rule.value_dim,
            BK=max(16, power_of_two(self.rule.key_dim)),
            SCALAR_GATE=self.rule.scalar_gate,
        )
