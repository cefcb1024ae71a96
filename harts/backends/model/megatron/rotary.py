"""Rotary embeddings by the positions of rows in their trajectories."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from harts.backends.model.megatron.call import TreeParams


class RowRotary(nn.Module):
    """Stands for a rotary embedding of Megatron: in a call with a plan, row c gets the angles of its position."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock: Any = stock
        self.positions: Tensor | None = None

    def get_rotary_seq_len(self, *given: Any, **others: Any) -> int:
        """Positions in the table; Megatron asks for it right before `forward`, and only here with the plan."""
        packed = others.get("packed_seq_params", given[4] if len(given) > 4 else None)
        self.positions = packed.position_ids if isinstance(packed, TreeParams) else None
        length: int = self.stock.get_rotary_seq_len(*given, **others)
        return length

    def forward(self, max_seq_len: int, **others: Any) -> Tensor:
        """Angles, [max_seq_len, 1, 1, channels], of a call with a plan [R, 1, 1, channels]."""
        positions, self.positions = self.positions, None
        table: Tensor = self.stock(max_seq_len, **others)
        return table if positions is None else table[positions]
