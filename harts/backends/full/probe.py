"""A start-up probe: which rows a kernel sees, and whether its results are those of dense attention, on small forests.

What "causal" means for fewer queries than keys differs between libraries and their versions, and some drop a mask
without a word. Numbers are then plausible and wrong, so that no such kernel serves before it has shown what it does.

Shape suffixes: R compact rows, H query heads, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import FullAttention, Need
from harts.backends.full.visibility import Passes, miscounted, read_visibility, visible_rows
from harts.backends.plan_tensors import AttentionViews
from harts.ir.runs import offsets

Runs = tuple[tuple[tuple[int, int], ...], ...]
"""(first row, rows) of the runs that each branch sees; the last are its own."""

SHARED: Runs = (
    # three levels: P 0:3 -> A 3:5 -> R0 5:9 and R1 14:17; P -> B 9:12 -> R2 12:14 and R3 17:19
    ((0, 9),),
    ((0, 3), (9, 5)),
    ((0, 5), (14, 3)),
    ((0, 3), (9, 3), (17, 2)),
    # two queries after three ancestors, one query after four, one without ancestors
    ((0, 3), (19, 2)),
    ((0, 4), (21, 1)),
    ((22, 1),),
    # a root that holds whole tiles of any kernel, and more than a tile behind more than two
    ((23, 413),),
    ((23, 301), (436, 131)),
    # more than a tile behind a few rows, and a few behind more than a tile; none a multiple of one
    ((0, 9), (567, 131)),
    ((0, 9), (567, 120), (698, 3)),
    # a path of seven runs
    ((23, 350), (701, 3)),
    ((23, 350), (701, 2), (704, 2)),
    ((23, 350), (701, 2), (704, 1), (706, 2)),
    ((23, 350), (701, 2), (704, 1), (706, 1), (708, 2)),
    ((23, 350), (701, 2), (704, 1), (706, 1), (708, 1), (710, 2)),
    ((23, 350), (701, 2), (704, 1), (706, 1), (708, 1), (710, 1), (712, 2)),
)
ALONE: Runs = (((0, 3),), ((3, 301),), ((304, 1),), ((305, 131),))
"""Nothing is shared: keys lie in order, and backends may launch something else."""
PADDING = 4
TOLERANCE = 0.05
"""Relative error in the Frobenius norm: several times that of 16-bit kernels, far below that of a wrong mask."""
_known: dict[Hashable, list[str]] = {}


def probe_faults(backend: FullAttention, need: Need) -> list[str]:
    """What the probe finds wrong with a backend, at the heads and head dims of `need`; empty if nothing is.

    Runs once a process for each class of backend, config, need and torch's setting of deterministic algorithms, which
    chooses kernels. What the kernel raises is a fault as well.
    """
    key = type(backend), backend.config.model_dump_json(), need, torch.are_deterministic_algorithms_enabled()
    if key not in _known:
        _known[key] = _probed(backend, need)
    return list(_known[key])


def _probed(backend: FullAttention, need: Need) -> list[str]:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            forests = (probe_views(torch.device(need.device), runs) for runs in (SHARED, ALONE))
            return next(filter(None, (_faults(backend, need, views) for views in forests)), [])
    except Exception as error:  # kernels and compilers of third parties can raise anything
        reason = (str(error).splitlines() or [""])[0]
        return [f"the start-up probe failed: {type(error).__name__}: {reason}"]


def _faults(backend: FullAttention, need: Need, views: AttentionViews) -> list[str]:
    seen = visible_rows(views)
    for wrong, when in zip(miscounted(backend, need, views, seen), Passes._fields, strict=True):
        if wrong.any():
            return [_wrong_pairs(backend, need, views, seen) or _wrong_weights(wrong, when)]
    errors = _errors(backend, need, views, seen)
    return [
        f"the start-up probe found an error of {error:.2g} in {name}, allowed is {TOLERANCE}"
        for name, error in errors.items()
        if not error <= TOLERANCE
    ]


def _wrong_pairs(backend: FullAttention, need: Need, views: AttentionViews, seen: Tensor) -> str | None:
    for found, when in zip(read_visibility(backend, need, views), Passes._fields, strict=True):
        wrong = (found != seen[:, None]).nonzero()
        if len(wrong):
            row, head, other = wrong[0].tolist()
            sees = "does not see" if seen[row, other] else "sees"
            return (
                f"the start-up probe found {len(wrong)} wrong pairs of rows {when}: in head {head}, row {row} {sees} "
                f"row {other} (its ancestors and itself are what a row sees)"
            )
    return None


def _wrong_weights(wrong: Tensor, when: str) -> str:
    row, head = wrong.nonzero()[0].tolist()
    return (
        f"the start-up probe found wrong weights of {int(wrong.any(1).sum())} rows {when}: in head {head}, those of "
        f"row {row} are not equal under equal scores"
    )


def probe_views(device: torch.device, branches: Runs = SHARED) -> AttentionViews:
    """Views of a small forest, with padding."""
    runs = np.array([run for branch in branches for run in branch], dtype=np.int64)
    own = np.array([branch[-1][1] for branch in branches], dtype=np.int64)
    return AttentionViews(
        cu_q=offsets(own),
        run_offset=offsets(np.array([len(branch) for branch in branches], dtype=np.int64)),
        run_row=runs[:, 0],
        run_length=runs[:, 1],
        rows=int(own.sum()) + PADDING,
        device=device,
    )


def _errors(backend: FullAttention, need: Need, views: AttentionViews, seen: Tensor) -> dict[str, float]:
    (heads, groups), (key_dim, value_dim) = need.full_heads, need.full_head_dims
    scale = 0.7 * key_dim**-0.5  # not what a kernel would take by itself
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(views.rows, *size, generator=draw).to(views.device, need.dtype)

    upstream = normal(heads, value_dim)
    given = [normal(heads, key_dim), normal(groups, key_dim), normal(groups, value_dim)]
    found = _run(lambda q, k, v: backend.attend(q, k, v, views, scale), given, upstream)
    wanted = _run(lambda q, k, v: _dense(q, k, v, seen, scale), [x.float() for x in given], upstream.float())
    return {
        name: float((a.float() - b).norm() / b.norm())
        for name, a, b in zip(
            ("outputs", "gradients of q", "gradients of k", "gradients of v"), found, wanted, strict=True
        )
    }


def _run(attend: Callable[[Tensor, Tensor, Tensor], Tensor], given: list[Tensor], upstream: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in given]
    out = attend(inputs[0], inputs[1], inputs[2])
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Masked softmax over all pairs; zeros for rows that see nothing."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, dim=1)) * scale
    nothing = ~seen.any(1)
    weights = scores.masked_fill(~(seen | nothing[:, None]), -torch.inf).softmax(-1)
    weights = weights.masked_fill(nothing[:, None], 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, dim=1))
