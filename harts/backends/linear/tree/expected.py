"""What each chunk kernel should have written, from the arguments of its launch alone.

Arguments and outputs have the names of the kernels' own parameters. An output that is wrong is therefore the fault of
that kernel: what kernels before it got wrong is in its arguments. Gradients of gates are those of natural logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts.backends.linear.tree.expected_states import backward_states, forward_states
from harts.backends.linear.tree.grid import SUB_CHUNK
from harts.backends.linear.tree.reference import (
    Chunks,
    chunk_scores,
    cumulative,
    from_state,
    gradients,
    natural,
    state_after,
    to_end,
    unit_inverse,
    w_and_u,
    wide,
)

Arguments = Mapping[str, Any]
Pairs = dict[str, tuple[Tensor, Tensor]]
"""Output -> (what was written, what should have been), where the kernel writes, both float64."""


class _Launch(NamedTuple):
    """Arguments of a launch as they were, in float64 by value head, and its outputs."""

    before: Arguments
    after: Arguments
    chunks: Chunks

    def heads(self, name: str) -> Tensor:
        return wide(self.before[name], self.before["HV"])

    def cells(self, name: str) -> Tensor:
        return self.chunks.cells(self.heads(name))

    def gates(self, name: str = "g") -> Tensor:
        return self.chunks.gates(natural(self.before[name]))

    def pair(self, name: str, cells: Tensor) -> tuple[Tensor, Tensor]:
        return self.after[name][self.chunks.covered].double(), self.chunks.rows(cells)

    def pair_rows(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        covered = self.chunks.covered
        return self.after[name][covered].double(), rows[covered].view_as(self.after[name][covered])


def _cumsum(a: _Launch) -> Pairs:
    scale = 1.0 if a.before["scale"] is None else a.before["scale"]
    cells = a.chunks.cells(a.before["s"].double())
    return {"o": a.pair("o", cumulative(cells, reverse=a.before["REVERSE"]) * scale)}


def _tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Lower triangle; what was never written above it may be NaN."""
    return torch.where(torch.ones_like(x, dtype=torch.bool).tril(diagonal), x, 0.0)


def _diagonal_blocks(x: Tensor) -> Tensor:
    """Blocks of SUB_CHUNK on the diagonal of chunks' matrices, [C, HV, 4, SUB_CHUNK, SUB_CHUNK]."""
    return torch.stack([x[..., i : i + SUB_CHUNK, i : i + SUB_CHUNK] for i in range(0, x.shape[-1], SUB_CHUNK)], dim=-3)


def _systems(a: _Launch) -> tuple[Tensor, Tensor]:
    """Scores of q with their scale, and A of the chunks' systems (I + A)."""
    of_q, of_k = chunk_scores(a.cells("q"), a.cells("k"), a.gates())
    return of_q * a.before["scale"], of_k * a.cells("beta")[..., None]


def _diagonal(a: _Launch, *, inverted: bool) -> Pairs:
    of_q, of_k = (_diagonal_blocks(x) for x in _systems(a))
    wanted = unit_inverse(of_k) if inverted else of_k
    found = [a.chunks.cells(a.after[name].double()) for name in ("Aqk", "Akk")]
    inside = a.chunks.inside[:, None].view(-1, 1, 4, SUB_CHUNK, 1)
    akk = found[1].view(wanted.shape)
    return {
        "Aqk": (_tril(_diagonal_blocks(found[0])), of_q * inside),
        "Akk": (_tril(akk), wanted * inside),
    }


def _solve_fused(a: _Launch) -> Pairs:
    of_q, system = _systems(a)
    given = a.chunks.cells(a.before["Akkd"].double())
    blocks = _tril(given.view(*given.shape[:2], -1, SUB_CHUNK, SUB_CHUNK), -1)
    if a.before["USE_SAFE_GATE"]:  # blocks on the diagonal have been inverted already
        blocks = unit_inverse(blocks) - torch.eye(SUB_CHUNK, dtype=blocks.dtype, device=blocks.device)
    size = system.shape[-1]
    off = torch.ones(size, size, dtype=torch.bool, device=system.device).tril()
    for i, block in enumerate(blocks.unbind(-3)):
        at = slice(i * SUB_CHUNK, (i + 1) * SUB_CHUNK)
        system[..., at, at] = block
        off[at, at] = False
    found = a.chunks.cells(a.after["Aqk"].double())
    of_q = of_q * a.chunks.inside[:, None, :, None]
    return {
        "Aqk": (torch.where(off, found, 0.0), torch.where(off, of_q, 0.0)),
        "Akk": a.pair("Akk", unit_inverse(system)),
    }


def _wy(a: _Launch, gate: str) -> Pairs:
    k, gates = a.cells("k"), a.gates(gate)
    w, u = w_and_u(a.cells("A"), k, a.cells("v"), a.cells("beta"), gates)
    pairs = {"w": a.pair("w", w), "u": a.pair("u", u)}
    if a.before.get("kg") is not None:
        pairs["kg"] = a.pair("kg", to_end(k, gates))
    if a.before.get("qg") is not None:
        pairs["qg"] = a.pair("qg", a.cells("q") * gates.exp())
    return pairs


def _gla_output(a: _Launch) -> Pairs:
    across = from_state(a.cells("q"), a.gates(), a.before["h"].double()) * a.before["scale"]
    return {"o": a.pair("o", across + _tril(a.cells("A")) @ a.cells("v"))}


def _kda_scores_backward(a: _Launch) -> Pairs:
    do, errors = a.cells("do"), a.cells("v")
    return {
        "dv": a.pair("dv", _tril(a.cells("A")).mT @ do),
        "dA": a.pair("dA", _tril(do @ errors.mT) * a.before["scale"]),
    }


def _system_gradient(solve: Tensor, dsolve: Tensor) -> Tensor:
    """Gradient of A from that of (I + A)^-1."""
    return -_tril(solve.mT @ _tril(dsolve, -1) @ solve.mT, -1)


def _kda_states_backward(a: _Launch) -> Pairs:
    chunks, errors, do, de = a.chunks, a.cells("v_new"), a.cells("do"), a.cells("dv")
    states, dstates, scale = a.before["h"].double(), a.before["dh"].double(), a.before["scale"]

    def loss(*leaves: Tensor) -> Tensor:
        *rows, gates, solve = leaves
        q, k, v, beta = (chunks.cells(x) for x in rows)
        g = chunks.gates(gates)
        w, u = w_and_u(solve, k, v, beta, g)
        outputs, after = from_state(q, g, states) * scale, state_after(states, k, g, errors)
        return torch.sum(do * outputs) + torch.sum(dstates * after) + torch.sum(de * (u - w @ states))

    solve = a.cells("A")
    leaves = *(a.heads(name) for name in ("q", "k", "v", "beta")), natural(a.before["g"]), solve
    *found, dsolve = gradients(loss, *leaves)
    pairs = {name: a.pair_rows(name, x) for name, x in zip(("dq", "dk", "dv2", "db", "dg"), found, strict=True)}
    return pairs | {"dA": a.pair("dA", _system_gradient(solve, dsolve))}


def _kda_intra_backward(a: _Launch) -> Pairs:
    chunks, dof_q, dof_k = a.chunks, _tril(a.cells("dAqk")), _tril(a.cells("dAkk"), -1)

    def loss(q: Tensor, k: Tensor, beta: Tensor, gates: Tensor) -> Tensor:
        of_q, of_k = chunk_scores(chunks.cells(q), chunks.cells(k), chunks.gates(gates))
        return (dof_q * of_q).sum() + (dof_k * of_k * chunks.cells(beta)[..., None]).sum()

    dq, dk, dbeta, dg = gradients(loss, *(a.heads(name) for name in ("q", "k", "beta")), natural(a.before["g"]))
    pairs = {f"{name}2": a.pair_rows(f"{name}2", a.heads(name) + x) for name, x in (("dq", dq), ("dk", dk), ("dg", dg))}
    return pairs | {"db": (a.after["db"].double().sum(0)[chunks.covered], dbeta[chunks.covered])}


def _kkt_solve(a: _Launch) -> Pairs:
    k = a.cells("k")
    _, of_k = chunk_scores(k, k, a.gates())
    return {"A": a.pair("A", unit_inverse(of_k * a.cells("beta")[..., None]))}


def _gdn_output(a: _Launch) -> Pairs:
    q, gates = a.cells("q"), a.gates()
    of_q, _ = chunk_scores(q, a.cells("k"), gates)
    found = from_state(q, gates, a.before["h"].double()) + of_q @ a.cells("v")
    return {"o": a.pair("o", found * a.before["scale"])}


def _gdn_errors_backward(a: _Launch) -> Pairs:
    of_q, _ = chunk_scores(a.cells("q"), a.cells("k"), a.gates())
    return {"dv": a.pair("dv", of_q.mT @ a.cells("do") * a.before["scale"])}


def _gdn_states_backward(a: _Launch) -> Pairs:
    chunks, errors, do = a.chunks, a.cells("v"), a.cells("do")
    states, dstates, scale = a.before["h"].double(), a.before["dh"].double(), a.before["scale"]

    def loss(q: Tensor, k: Tensor, gates: Tensor) -> Tensor:
        q, k, g = chunks.cells(q), chunks.cells(k), chunks.gates(gates)
        outputs = (from_state(q, g, states) + chunk_scores(q, k, g)[0] @ errors) * scale
        return torch.sum(do * outputs) + torch.sum(dstates * state_after(states, k, g, errors))

    dq, dk, dg = gradients(loss, a.heads("q"), a.heads("k"), natural(a.before["g"]))
    return {
        "dq": a.pair_rows("dq", dq),
        "dk": a.pair_rows("dk", dk),
        "dw": a.pair("dw", -a.cells("dv") @ states.mT),
        "dg": (a.after["dg"].double().sum(0)[chunks.covered], dg[..., 0][chunks.covered]),
    }


def _gdn_wy_backward(a: _Launch) -> Pairs:
    chunks, dw, du, solve = a.chunks, a.cells("dw"), a.cells("du"), a.cells("A")

    def through_rows(k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, solve: Tensor) -> Tensor:
        w, u = w_and_u(solve, chunks.cells(k), chunks.cells(v), chunks.cells(beta), chunks.gates(gates))
        return (dw * w).sum() + (du * u).sum()

    leaves = *(a.heads(name) for name in ("k", "v", "beta")), natural(a.before["g"])
    *direct, dsolve = gradients(through_rows, *leaves, solve)
    dsystem = _system_gradient(solve, dsolve)

    def through_system(k: Tensor, v: Tensor, beta: Tensor, gates: Tensor) -> Tensor:
        k = chunks.cells(k)
        return (dsystem * chunk_scores(k, k, chunks.gates(gates))[1] * chunks.cells(beta)[..., None]).sum()

    sums = [x + y for x, y in zip(direct, gradients(through_system, *leaves), strict=True)]
    return {name: a.pair_rows(name, x) for name, x in zip(("dk", "dv", "db", "dg"), sums, strict=True)}


_CHUNK_KERNELS: dict[str, Callable[[_Launch], Pairs]] = {
    "chunk_local_cumsum_vector_kernel": _cumsum,
    "chunk_local_cumsum_scalar_kernel": _cumsum,
    "chunk_kda_fwd_kernel_intra_sub_chunk": lambda a: _diagonal(a, inverted=True),
    "chunk_kda_fwd_kernel_intra_token_parallel": lambda a: _diagonal(a, inverted=False),
    "chunk_kda_fwd_kernel_inter_solve_fused": _solve_fused,
    "recompute_w_u_fwd_kda_kernel": lambda a: _wy(a, "gk"),
    "chunk_gla_fwd_kernel_o": _gla_output,
    "chunk_kda_bwd_kernel_dAv": _kda_scores_backward,
    "chunk_kda_bwd_kernel_wy_dqkg_fused": _kda_states_backward,
    "chunk_kda_bwd_kernel_intra": _kda_intra_backward,
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": _kkt_solve,
    "recompute_w_u_fwd_kernel": lambda a: _wy(a, "g"),
    "chunk_fwd_kernel_o": _gdn_output,
    "chunk_bwd_kernel_dv_local": _gdn_errors_backward,
    "chunk_bwd_kernel_dqkwg": _gdn_states_backward,
    "prepare_wy_repr_bwd_kernel": _gdn_wy_backward,
}

_STATE_KERNELS = {"forward_states_kernel": forward_states, "backward_states_kernel": backward_states}


def expected(kernel: str, before: Arguments, after: Arguments) -> Pairs:
    """What a launch has written and what it should have.

    Args:
        kernel: its name.
        before: arguments of the launch; tensors as they were.
        after: the same; tensors as they are now.
    """
    if kernel in _STATE_KERNELS:
        return _STATE_KERNELS[kernel](before, after)
    chunks = Chunks(before["cu_seqlens"], before.get("chunk_indices"))
    return _CHUNK_KERNELS[kernel](_Launch(before, after, chunks))
