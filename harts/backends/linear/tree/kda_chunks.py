"""Chunk-parallel work of KDA, in flash-linear-attention's kernels: everything but the state recurrence.

Each function launches on one buffer of rows. Outputs of rows that no chunk covers are left as allocated. Names: `g` is
the cumulative gate of a chunk in log2, `scores` and `solve` are A_qk and (I + A_kk)^-1, [T, HV, 64].
"""

from __future__ import annotations

import torch
from fla.ops.gla.chunk import chunk_gla_fwd_kernel_o
from fla.ops.kda import chunk_bwd, chunk_intra, chunk_intra_token_parallel, wy_fast
from fla.ops.utils.cumsum import chunk_local_cumsum_vector_kernel
from torch import Tensor

from harts.backends.linear.sizes import ceil_div, power_of_two
from harts.backends.linear.tree.grid import CHUNK, SUB_CHUNK, Grid, Inputs
from harts.backends.linear.tree.launch import Launcher, bare
from harts.backends.linear.tree.machine import interpreted
from harts.backends.linear.tree.rule import LOG2_E, Backward, Kept, Rows, Rule

SAFE_GATE_SHIFT = 2.0 * LOG2_E
"""Where the kernels of bounded gates put the reference gate, as chunk_kda does."""

USE_GATHER = chunk_intra.IS_GATHER_SUPPORTED and not interpreted()
"""The interpreter cannot run the gather that these kernels have captured."""

CUMSUM = bare(chunk_local_cumsum_vector_kernel)
DIAGONAL_BOUNDED = bare(chunk_intra.chunk_kda_fwd_kernel_intra_sub_chunk)
DIAGONAL = bare(chunk_intra_token_parallel.chunk_kda_fwd_kernel_intra_token_parallel)
SOLVE = bare(chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused)
WY = bare(wy_fast.recompute_w_u_fwd_kda_kernel)
OUTPUT = bare(chunk_gla_fwd_kernel_o)
SCORES_BACKWARD = bare(chunk_bwd.chunk_kda_bwd_kernel_dAv)
STATES_BACKWARD = bare(chunk_bwd.chunk_kda_bwd_kernel_wy_dqkg_fused)
INTRA_BACKWARD = bare(chunk_intra.chunk_kda_bwd_kernel_intra)

KERNELS = (CUMSUM, DIAGONAL_BOUNDED, DIAGONAL, SOLVE, WY, OUTPUT, SCORES_BACKWARD, STATES_BACKWARD, INTRA_BACKWARD)


class KdaChunks(Rule):
    """One gate a key channel."""

    scalar_gate = False

    def __init__(self, launcher: Launcher, safe_gate: bool) -> None:
        super().__init__(launcher)
        self.safe_gate = safe_gate

    def keep(self, x: Inputs, grid: Grid) -> Kept:  # noqa: D102
        g = torch.empty_like(x.g, dtype=torch.float32)
        self._cumsum(x.g, g, grid, scale=LOG2_E, reverse=False)
        rows, value_heads = x.beta.shape
        scores = x.k.new_empty(rows, value_heads, CHUNK)
        solve = x.k.new_zeros(rows, value_heads, CHUNK)  # kernels write the lower blocks alone
        diagonal = x.k.new_empty(rows, value_heads, SUB_CHUNK, dtype=torch.float32)
        shared = self.shared(x, grid, "q", "k") | {"g": g, "beta": x.beta, "Aqk": scores, "scale": self.scale}
        shared |= {"BT": CHUNK, "BC": SUB_CHUNK}
        block = power_of_two(self.key_dim)
        if self.safe_gate:
            self.launcher.run(
                DIAGONAL_BOUNDED,
                (grid.chunks, CHUNK // SUB_CHUNK, value_heads),
                **shared,
                Akk=diagonal,
                chunk_indices=grid.chunk_indices,
                BK=block,
                GATE_SHIFT=SAFE_GATE_SHIFT,
                USE_GATHER=USE_GATHER,
            )
        else:
            heads = self.launcher.config(DIAGONAL)["BH"]
            self.launcher.run(
                DIAGONAL, (grid.rows, ceil_div(value_heads, heads)), **shared, Akk=diagonal, N=grid.runs, BK=block
            )
        self.launcher.run(
            SOLVE,
            (grid.chunks, value_heads),
            **shared,
            Akkd=diagonal,
            Akk=solve,
            chunk_indices=grid.chunk_indices,
            NC=CHUNK // SUB_CHUNK,
            USE_SAFE_GATE=self.safe_gate,
        )
        return Kept(g, solve, scores)

    def state_rows(self, x: Inputs, kept: Kept, grid: Grid, *, with_q: bool) -> Rows:  # noqa: D102
        rows, value_heads = x.beta.shape
        shape = rows, value_heads, self.key_dim
        w, k = x.k.new_empty(shape), x.k.new_empty(shape)
        q = x.k.new_empty(shape) if with_q else k
        u = torch.empty_like(x.v)
        self.launcher.run(
            WY,
            (grid.chunks, value_heads),
            **self.shared(x, grid, "q", "k"),
            qg=q if with_q else None,
            kg=k,
            v=x.v,
            beta=x.beta,
            w=w,
            u=u,
            A=kept.solve,
            gk=kept.g,
            chunk_indices=grid.chunk_indices,
            V=self.value_dim,
            BT=CHUNK,
            BK=64,
            BV=64,
            STORE_QG=with_q,
            STORE_KG=True,
        )
        return Rows(q, k, w, u)

    def outputs(self, x: Inputs, kept: Kept, grid: Grid, states: Tensor, errors: Tensor) -> Tensor:  # noqa: D102
        output = torch.empty_like(x.v)
        self.launcher.run(
            OUTPUT,
            (ceil_div(self.value_dim, self.launcher.config(OUTPUT)["BV"]) * grid.chunks, x.v.shape[1]),
            **self.shared(x, grid, "q"),
            v=errors,
            g=kept.g,
            h=states,
            o=output,
            A=kept.scores,
            chunk_indices=grid.chunk_indices,
            scale=self.scale,
            V=self.value_dim,
            BT=CHUNK,
            STATE_V_FIRST=False,
        )
        return output

    def error_gradients(  # noqa: D102
        self, x: Inputs, kept: Kept, grid: Grid, errors: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        de = torch.empty_like(do)
        dscores = x.v.new_empty(*x.beta.shape, CHUNK, dtype=torch.float32)
        self.launcher.run(
            SCORES_BACKWARD,
            (grid.chunks, x.v.shape[1]),
            **self.shared(x, grid, "q", "k"),
            v=errors,
            A=kept.scores,
            do=do,
            dv=de,
            dA=dscores,
            chunk_indices=grid.chunk_indices,
            scale=self.scale,
            V=self.value_dim,
            BT=CHUNK,
            BK=self.block(self.key_dim, 128),
            BV=self.block(self.value_dim, 128),
        )
        return de, dscores

    def input_gradients(self, x: Inputs, kept: Kept, grid: Grid, back: Backward, dtype: torch.dtype) -> Inputs:  # noqa: D102
        dq, dk, dg = (torch.empty_like(kept.g) for _ in range(3))
        dv = torch.empty_like(x.v, dtype=dtype)
        dbeta = torch.empty_like(x.beta, dtype=torch.float32)
        dsolve = torch.empty_like(kept.solve, dtype=torch.float32)
        shared = self.shared(x, grid, "q", "k") | {"g": kept.g, "beta": x.beta, "chunk_indices": grid.chunk_indices}
        self.launcher.run(
            STATES_BACKWARD,
            (grid.chunks, x.v.shape[1]),
            **shared,
            v=x.v,
            v_new=back.errors,
            A=kept.solve,
            h=back.states,
            do=back.do,
            dh=back.dstates,
            dq=dq,
            dk=dk,
            dv=back.de,
            dv2=dv,
            dg=dg,
            db=dbeta,
            dA=dsolve,
            scale=self.scale,
            V=self.value_dim,
            BT=CHUNK,
            STATE_V_FIRST=False,
        )
        block = min(32, power_of_two(self.key_dim))
        blocks, sub_chunks = ceil_div(self.key_dim, block), CHUNK // SUB_CHUNK
        dbeta_blocks = dbeta.new_empty(blocks, grid.rows, x.beta.shape[1])
        # each program reads its own tile of dq, dk and dg before it writes it: the sums are formed in place
        self.launcher.run(
            INTRA_BACKWARD,
            (blocks * sub_chunks * grid.chunks, x.v.shape[1]),
            **shared,
            dAqk=back.dscores,
            dAkk=dsolve,
            dq=dq,
            dq2=dq,
            dk=dk,
            dk2=dk,
            dg=dg,
            dg2=dg,
            db=dbeta_blocks,
            B=1,
            BT=CHUNK,
            BC=SUB_CHUNK,
            BK=block,
            NC=sub_chunks,
            SAFE_GATE=self.safe_gate,
            GATE_SHIFT=SAFE_GATE_SHIFT,
            USE_GATHER=USE_GATHER,
        )
        self._cumsum(dg, dg, grid, scale=None, reverse=True)
        dbeta[: grid.rows].add_(dbeta_blocks.sum(0))
        return Inputs(dq, dk, dv, dg, dbeta)

    def _cumsum(self, source: Tensor, target: Tensor, grid: Grid, *, scale: float | None, reverse: bool) -> None:
        _, heads, size = source.shape
        self.launcher.run(
            CUMSUM,
            (ceil_div(size, self.launcher.config(CUMSUM)["BS"]) * grid.chunks, heads),
            s=source,
            o=target,
            scale=scale,
            cu_seqlens=grid.cu_seqlens,
            chunk_indices=grid.chunk_indices,
            T=grid.rows,
            B=1,
            H=heads,
            S=size,
            BT=CHUNK,
            REVERSE=reverse,
            HAS_SCALE=scale is not None,
            IS_VARLEN=True,
        )
