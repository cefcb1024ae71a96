"""What the state kernels should have written: the recurrence in float64, one sequence after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harts.backends.linear.tree import table
from harts.backends.linear.tree.grid import CHUNK
from harts.backends.linear.tree.reference import natural, wide

BUFFERS = ("", "_head")
"""Endings of the names of arguments that come for compact rows and for gathered ones."""


class _Walk:
    """Float64 copies of the arguments, by name and buffer, and places for what is computed."""

    def __init__(self, before: Mapping[str, Any], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        self.value_heads, self.scalar = before["HV"], before["SCALAR_GATE"]
        self.head_dims = before["K"], before["V"]
        self.sequences: list[list[int]] = before["sequences"].tolist()
        self.spans: list[list[int]] = before["spans"].tolist()
        self.x = {name + end: wide(before[name + end], self.value_heads) for name in inputs for end in BUFFERS}
        self.gates = {end: natural(before["g" + end]) for end in BUFFERS}
        self.wanted = {
            name + end: torch.zeros_like(before[name + end], dtype=torch.float64) for name in outputs for end in BUFFERS
        }
        self.written = {name: torch.zeros(len(x), dtype=torch.bool, device=x.device) for name, x in self.wanted.items()}

    def chunks(self, span: list[int]) -> Iterator[tuple[str, int, slice]]:
        """Buffer, chunk and rows of each chunk of a span."""
        end = BUFFERS[span[table.IN_HEAD]]
        for i, row in enumerate(range(span[table.ROW], span[table.END], CHUNK)):
            yield end, span[table.CHUNK] + i, slice(row, min(row + CHUNK, span[table.END]))

    def spans_of(self, sequence: list[int]) -> list[list[int]]:
        return self.spans[sequence[table.SPANS_BEGIN] : sequence[table.SPANS_END]]

    def zero_state(self) -> Tensor:
        return self.x["w"].new_zeros(self.value_heads, *self.head_dims)

    def put(self, name: str, at: int | slice, value: Tensor) -> None:
        self.wanted[name][at] = value
        self.written[name][at] = True

    def heads(self, name: str, rows: slice) -> Tensor:
        """[HV, rows, ...]."""
        return self.x[name][rows].transpose(0, 1)

    def to_end(self, end: str, rows: slice) -> Tensor:
        """Decay of each row to the end of its chunk, [HV, rows, 1]; keys of gates a channel are decayed already."""
        gates = self.gates[end][rows].transpose(0, 1)
        return (gates[:, -1:] - gates).exp() if self.scalar else torch.ones_like(gates[..., :1])

    def decay(self, end: str, rows: slice) -> Tensor:
        """Of the state over a chunk, [HV, L, 1]."""
        return self.gates[end][rows.stop - 1][..., None].exp()

    def pairs(self, after: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        """(found, wanted) of every output, where something was to be written."""
        return {
            name: (after[name].double()[self.written[name]], wanted[self.written[name]])
            for name, wanted in self.wanted.items()
            if self.written[name].any()
        }


def forward_states(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """States before chunks, errors and, if they are to be written, the states of the bank."""
    walk = _Walk(before, ("w", "u", "k"), ("states", "errors"))
    bank = before["bank"].double()
    made = []
    for sequence in walk.sequences:
        source = sequence[table.SOURCE]
        state = bank[source] if source >= 0 else walk.zero_state()
        for span in walk.spans_of(sequence):
            for end, chunk, rows in walk.chunks(span):
                walk.put("states" + end, chunk, state)
                errors = walk.heads("u" + end, rows) - walk.heads("w" + end, rows) @ state
                walk.put("errors" + end, rows, errors.transpose(0, 1))
                k = walk.heads("k" + end, rows) * walk.to_end(end, rows)
                state = walk.decay(end, rows) * state + k.mT @ errors
            if before["WRITE"] and span[table.SLOT] >= 0:
                bank[span[table.SLOT]] = state
                made.append(span[table.SLOT])
    pairs = walk.pairs(after)
    return pairs | ({"bank": (after["bank"].double()[made], bank[made])} if made else {})


def backward_states(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of the states after chunks, of the errors, and of the states that sequences start from."""
    walk = _Walk(before, ("q", "k", "w", "do", "de"), ("dstates", "de"))
    dbank, consumers = before["dbank"], before["consumers"].tolist()
    dsource = torch.zeros_like(before["dsource"], dtype=torch.float64)
    for sequence in walk.sequences:
        dstate = walk.zero_state()
        for span in reversed(walk.spans_of(sequence)):
            slot = span[table.SLOT]
            if slot >= 0:
                outside = 0.0 if dbank is None else dbank[slot].double()
                dstate = dstate + outside + dsource[consumers[slot] : consumers[slot + 1]].sum(0)
            for end, chunk, rows in reversed(list(walk.chunks(span))):
                walk.put("dstates" + end, chunk, dstate)
                k, q = walk.heads("k" + end, rows) * walk.to_end(end, rows), walk.heads("q" + end, rows)
                if walk.scalar:
                    q = q * walk.gates[end][rows].transpose(0, 1).exp()
                de = walk.heads("de" + end, rows) + k @ dstate
                walk.put("de" + end, rows, de.transpose(0, 1))
                dstate = walk.decay(end, rows) * dstate + before["scale"] * q.mT @ walk.heads("do" + end, rows)
                dstate = dstate - walk.heads("w" + end, rows).mT @ de
        if sequence[table.SOURCE] >= 0:
            dsource[sequence[table.PLACE]] = dstate
    pairs = walk.pairs(after)
    return pairs | ({"dsource": (after["dsource"].double(), dsource)} if len(dsource) else {})
