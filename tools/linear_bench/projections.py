"""The matrix products around the recurrence in one linear-attention layer: the same whatever runs the recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_bench.candidates import Candidate, Part
from linear_bench.inputs import Shape


def projections(shape: Shape, rows: int, seed: int) -> Candidate:
    """q, k, v, decay, beta, output gate and output projections on C rows; hidden size is H * K.

    Convolution, norms and activations are not in it.
    """
    keys, values = shape.heads * shape.key_dim, shape.value_heads * shape.value_dim
    hidden = keys
    gates = shape.value_heads * (shape.key_dim if shape.rule == "kda" else 1)
    draw = torch.Generator(shape.device).manual_seed(seed)

    def leaf(*size: int) -> Tensor:
        made = torch.randn(size, generator=draw, device=shape.device) * size[-1] ** -0.5
        return made.to(shape.dtype).requires_grad_()

    leaves = {
        "x": leaf(rows, hidden),
        "mixed": leaf(rows, values),
        "qkv": leaf(2 * keys + values, hidden),
        "beta": leaf(shape.value_heads, hidden),
        "gate": leaf(values, hidden),
        "out": leaf(hidden, values),
    }
    if shape.rule == "kda":  # the decay of each channel goes through few dimensions
        leaves |= {"down": leaf(shape.key_dim, hidden), "decay": leaf(gates, shape.key_dim)}
    else:
        leaves |= {"decay": leaf(gates, hidden)}
    with torch.no_grad():
        upstream = [torch.randn_like(x) for x in _run(leaves)]
    return Candidate("projections", (Part(_run, leaves, upstream),))


def _run(leaves: dict[str, Tensor]) -> list[Tensor]:
    x = leaves["x"]
    low = x @ leaves["down"].T if "down" in leaves else x
    outputs = [x @ leaves[name].T for name in ("qkv", "beta", "gate")]
    return [*outputs, low @ leaves["decay"].T, leaves["mixed"] @ leaves["out"].T]
