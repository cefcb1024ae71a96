"""Chunk-parallel work of GDN, in flash-linear-attention's kernels: everything but the state recurrence.

Names as in `kda_chunks`. One gate a head; q and k enter the recurrence as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.common import chunk_o
from fla.ops.gated_delta_rule import chunk_fwd, wy_fast
from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel
from torch import Tensor

from harts.backends.linear.sizes import ceil_div
from harts.backends.linear.tree.grid import CHUNK, SUB_CHUNK, Grid, Inputs
from harts.backends.linear.tree.launch import bare
from harts.backends.linear.tree.rule import LOG2_E, Backward, Kept, Rows, Rule

CUMSUM = bare(chunk_local_cumsum_scalar_kernel)
SOLVE = bare(chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel)
WY = bare(wy_fast.recompute_w_u_fwd_kernel)
OUTPUT = bare(chunk_o.chunk_fwd_kernel_o)
ERRORS_BACKWARD = bare(chunk_o.chunk_bwd_kernel_dv_local)
STATES_BACKWARD = bare(chunk_o.chunk_bwd_kernel_dqkwg)
WY_BACKWARD = bare(wy_fast.prepare_wy_repr_bwd_kernel)

KERNELS = (CUMSUM, SOLVE, WY, OUTPUT, ERRORS_BACKWARD, STATES_BACKWARD, WY_BACKWARD)


class GdnChunks(Rule):
    """One gate a value head."""

    scalar_gate = True

    def keep(self, x: Inputs, grid: Grid) -> Kept:  # noqa: D102
        g = torch.empty_like(x.g, dtype=torch.float32)
        self._cumsum(x.g, g, grid, scale=LOG2_E, reverse=False)
        solve = x.k.new_zeros(*x.beta.shape, CHUNK)  # the kernel writes the lower blocks alone
        self.launcher.run(
            SOLVE,
            (grid.chunks, x.v.shape[1]),
            **self._shared(x, g, grid, "k"),
            beta=x.beta,
            A=solve,
            BC=SUB_CHUNK,
        )
        return Kept(g, solve, None)

    def state_rows(self, x: Inputs, kept: Kept, grid: Grid, *, with_q: bool) -> Rows:  # noqa: D102
        w, u = x.k.new_empty(*x.beta.shape, self.key_dim), torch.empty_like(x.v)
        self.launcher.run(
            WY,
            (grid.chunks, x.v.shape[1]),
            **self._shared(x, kept.g, grid, "k"),
            v=x.v,
            beta=x.beta,
            w=w,
            u=u,
            A=kept.solve,
            V=self.value_dim,
            BK=64,
            BV=64,
        )
        return Rows(x.q, x.k, w, u)

    def outputs(self, x: Inputs, kept: Kept, grid: Grid, states: Tensor, errors: Tensor) -> Tensor:  # noqa: D102
        output = torch.empty_like(x.v)
        self.launcher.run(
            OUTPUT,
            (ceil_div(self.value_dim, self.launcher.config(OUTPUT)["BV"]) * grid.chunks, x.v.shape[1]),
            **self._shared(x, kept.g, grid, "q", "k"),
            v=errors,
            h=states,
            g_gamma=None,
            o=output,
            scale=self.scale,
            V=self.value_dim,
            USE_G_GAMMA=False,
            STATE_V_FIRST=False,
        )
        return output

    def error_gradients(  # noqa: D102
        self, x: Inputs, kept: Kept, grid: Grid, errors: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        de = torch.empty_like(do)
        self.launcher.run(
            ERRORS_BACKWARD,
            (grid.chunks, x.v.shape[1]),
            **self._shared(x, kept.g, grid, "q", "k"),
            g_gamma=None,
            A=None,
            do=do,
            dv=de,
            scale=self.scale,
            V=self.value_dim,
            BK=self.block(self.key_dim, 128),
            BV=self.block(self.value_dim, 128),
            USE_G_GAMMA=False,
            USE_A=False,
        )
        return de, None

    def input_gradients(self, x: Inputs, kept: Kept, grid: Grid, back: Backward, dtype: torch.dtype) -> Inputs:  # noqa: D102
        rows, value_heads = x.beta.shape
        block = self.block(self.key_dim, 128)
        blocks = ceil_div(self.key_dim, block)
        dq, dk, dk_solve = (x.k.new_empty(rows, value_heads, self.key_dim, dtype=dtype) for _ in range(3))
        dw = back.w
        dg_blocks = kept.g.new_empty(blocks, grid.rows, value_heads)
        self.launcher.run(
            STATES_BACKWARD,
            (blocks * grid.chunks, value_heads),
            **self._shared(x, kept.g, grid, "q", "k"),
            v=back.errors,
            g_gamma=None,
            h=back.states,
            do=back.do,
            dh=back.dstates,
            dq=dq,
            dk=dk,
            dw=dw,
            dv=back.de,
            dg=dg_blocks,
            scale=self.scale,
            B=1,
            V=self.value_dim,
            BK=block,
            BV=self.block(self.value_dim, 128),
            USE_G_GAMMA=False,
            USE_DW=True,
            STATE_V_FIRST=False,
        )
        dv = torch.empty_like(x.v, dtype=dtype)
        dbeta, dg = torch.empty_like(kept.g), torch.empty_like(kept.g)
        self.launcher.run(
            WY_BACKWARD,
            (grid.chunks, value_heads),
            **self._shared(x, kept.g, grid, "k"),
            v=x.v,
            beta=x.beta,
            A=kept.solve,
            dw=dw,
            du=back.de,
            dk=dk_solve,
            dv=dv,
            db=dbeta,
            dg=dg,
            V=self.value_dim,
            BK=self.block(self.key_dim, 64),
            BV=self.block(self.value_dim, 64),
        )
        dg[: grid.rows].add_(dg_blocks.sum(0) if blocks > 1 else dg_blocks[0])
        self._cumsum(dg, dg, grid, scale=None, reverse=True)
        return Inputs(dq, dk.add_(dk_solve), dv, dg, dbeta)

    def _shared(self, x: Inputs, g: Tensor, grid: Grid, *names: str) -> dict[str, Any]:
        common = {"g": g, "chunk_indices": grid.chunk_indices, "BT": CHUNK, "USE_G": True}
        return self.shared(x, grid, *names) | common

    def _cumsum(self, source: Tensor, target: Tensor, grid: Grid, *, scale: float | None, reverse: bool) -> None:
        heads = source.shape[1]
        self.launcher.run(
            CUMSUM,
            (grid.chunks * heads,),
            s=source,
            o=target,
            scale=scale,
            cu_seqlens=grid.cu_seqlens,
            chunk_indices=grid.chunk_indices,
            T=grid.rows,
            B=1,
            H=heads,
            BT=CHUNK,
            REVERSE=reverse,
            HAS_SCALE=scale is not None,
            IS_VARLEN=True,
        )
