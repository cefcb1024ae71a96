"""Checks of a linear-attention backend and of the short convolution at a model's shapes, on the pipeline's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need
from harts.backends.linear.conv import short_conv
from harts.backends.linear.tree.reference import relative_error
from harts.backends.plan_tensors import build_plan_tensors
from harts.train.kernel_cases import FORKS, SEED, case, layout_of, oracle, run
from harts.train.versions import import_if_there

BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-10}
"""Relative error in the Frobenius norm that rounding to a dtype explains, some times over."""
CALLS = 30
"""Identical calls whose bits must be equal."""
PREFIXES = (21, 85)
"""Tokens before the one that is changed: in a partly filled block of 16, in the first chunk and in a later one."""
CHANGED_GATE = -4.9
"""Log decay of the changed token, near the lower bound that bounded gates have."""

RETUNE = "make another table with `harts tune`, name it in kernel_configs, and run the doctor again"


@dataclass(frozen=True)
class Check:
    """One check and how it went."""

    name: str
    ok: bool
    about: str
    """What was found, for a person."""
    fix: str = ""
    """What to do if it failed."""
    values: dict[str, float] = field(default_factory=dict)
    """What was measured, by name."""
    bound: float | None = None
    """Largest value that passes."""
    config: dict[str, int] = field(default_factory=dict)
    """Launch configuration of a kernel."""


def guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """The checks, or one that says what was raised: the doctor goes on."""
    try:
        return check()
    except Exception as error:  # kernels that do not compile or launch raise anything
        lines = [str(error).splitlines()[0] if str(error) else "", *getattr(error, "__notes__", [])]
        about = f"{type(error).__name__}: {'; '.join(line for line in lines if line)}"
        return [Check(name, False, about, f"the kernels do not run here with these configurations: {RETUNE}")]


def linear_checks(backend: LinearAttention, need: Need) -> list[Check]:
    """Everything that is checked of a linear-attention backend."""
    parts: list[tuple[str, Callable[[LinearAttention, Need], list[Check]]]] = [
        ("kernels", kernel_checks),
        ("operator", operator_check),
        ("prefix", prefix_check),
        ("repeat", repeat_check),
    ]
    return [check for name, part in parts for check in guarded(name, lambda part=part: part(backend, need))]  # type: ignore[misc]


def tree_backend(backend: LinearAttention) -> Any:
    """The backend, if its launches can be watched; else None."""
    module = import_if_there("harts.backends.linear.tree.backend")  # needs triton
    return backend if module is not None and isinstance(backend, module.TreeBackend) else None


def kernel_checks(backend: LinearAttention, need: Need) -> list[Check]:
    """Each launch of a forward and backward pass against float64, computed from the launch's own arguments."""
    watched = tree_backend(backend)
    if watched is None:
        return []
    from harts.backends.linear.tree.launch import configs_for  # noqa: PLC0415  (needs triton)
    from harts.backends.linear.tree.watch import WatchingLauncher, Worst  # noqa: PLC0415

    seen: dict[str, Worst] = {}
    given, before = case(backend, need, FORKS), watched.launchers
    device = torch.device(need.device)

    def watching(head_dims: tuple[int, int]) -> WatchingLauncher:
        made = before(head_dims).configs if before else configs_for(device, watched.config.kernel_configs)
        return WatchingLauncher(made, head_dims, seen)

    watched.launchers = watching
    try:
        run(backend, given)
    finally:
        watched.launchers = before
    bound = BOUNDS[need.dtype]
    return [
        Check(
            name=f"kernel {kernel}",
            ok=worst.error <= bound,
            about=f"{worst.output} is {worst.error:.1e} from float64, the worst in {worst.launches} launches",
            fix=f"this kernel is wrong with its configuration: {RETUNE}; if none passes, install the versions of the "
            "README",
            values={worst.output: worst.error},
            bound=bound,
            config=dict(worst.config),
        )
        for kernel, worst in seen.items()
    ]


def operator_check(backend: LinearAttention, need: Need) -> list[Check]:
    """Outputs and all gradients on a small tree against float64."""
    given = case(backend, need, FORKS)
    found, wanted = run(backend, given), oracle(given)
    errors = {name: relative_error(x, wanted.tensors[name]) for name, x in found.tensors.items()}
    worst, bound = max(errors, key=errors.__getitem__), BOUNDS[need.dtype]
    about = f"{worst}{'' if worst == 'output' else ' gradient'} is {errors[worst]:.1e} from float64"
    fix = "mend the kernels that fail first; if none does, this is a fault of HARTS: report it with this output"
    return [Check("operator", errors[worst] <= bound, f"{about}, the worst of {len(errors)}", fix, errors, bound)]


def prefix_check(backend: LinearAttention, need: Need) -> list[Check]:
    """Whether outputs of a prefix keep their bits when the token after it is changed, or is not there."""
    errors = {str(length): _prefix_error(backend, need, length) for length in PREFIXES}
    bound = 0.0 if backend.bitwise else BOUNDS[need.dtype]
    ok = max(errors.values()) <= bound
    kept = "keep their bits" if backend.bitwise else f"stay within {bound:.0e}"
    about = f"outputs of {' and '.join(errors)} tokens {kept if ok else 'change'} under other tokens after them"
    fix = "later tokens leak into earlier ones: install fla-core 0.6.0 or newer, or set safe_gate to false"
    return [Check("prefix", ok, about, fix, errors, bound)]


def _prefix_error(backend: LinearAttention, need: Need, length: int) -> float:
    draw = torch.Generator().manual_seed(SEED)
    first = backend.draw_inputs(length + 1, need, draw)
    other = backend.draw_inputs(length + 1, need, draw)
    changed = {name: torch.cat([x[:length], other[name][length:]]) for name, x in first.items()}
    if "g" in changed:
        changed["g"][length] = CHANGED_GATE
    plans = [
        build_plan_tensors(layout_of([(-1, rows)], need, 1), need.device, torch.float32)
        for rows in (length, length + 1)
    ]
    with torch.no_grad():
        alone = backend.mix({name: x[:length].to(need.device) for name, x in first.items()}, plans[0])
        longer = [
            backend.mix({name: x.to(need.device) for name, x in inputs.items()}, plans[1])[:length]
            for inputs in (first, changed)
        ]
    return max(0.0 if torch.equal(x, alone) else relative_error(x, alone) for x in longer)


def repeat_check(backend: LinearAttention, need: Need) -> list[Check]:
    """Whether identical calls give identical bits, gradients included."""
    given = case(backend, need, FORKS)
    first = run(backend, given)
    differ = sum(not run(backend, given).same_bits(first) for _ in range(CALLS - 1))
    about = f"{CALLS} identical calls: " + (f"{differ} differ from the first" if differ else "equal bits")
    fix = f"a kernel races: {RETUNE}; install a newer triton if that does not help"
    return [Check("repeat", not differ, about, fix, {"differ": float(differ)}, 0.0)]


def conv_checks(need: Need) -> list[Check]:
    """Each kernel of the short convolution against float64, on the channels of q, k and v together."""
    from harts.backends.linear.conv_fused import fused_conv  # noqa: PLC0415  (needs triton)
    from harts.backends.linear.conv_users import shared_rows  # noqa: PLC0415

    plan = build_plan_tensors(layout_of(FORKS, need), need.device, torch.float32)
    draw = torch.Generator().manual_seed(SEED)
    (heads, value_heads), (key_dim, value_dim) = need.linear_heads, need.linear_head_dims
    channels = 2 * heads * key_dim + value_heads * value_dim
    shapes = (len(plan.input_ids), channels), (channels, need.conv_width), (len(plan.input_ids), channels)
    x, weight, dy = (torch.randn(shape, generator=draw).to(need.device, need.dtype) for shape in shapes)

    def tensors(conv: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in (x, weight)]
        y = conv(*leaves, plan)
        dx, dweight = torch.autograd.grad(y, leaves, dy.to(dtype))
        return y.detach(), dx, dweight

    (y, dx, dweight), (y64, dx64, dweight64) = tensors(fused_conv, need.dtype), tensors(short_conv, torch.float64)
    shared = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    shared[shared_rows(plan.window, plan.cu_rows, plan.device).row] = True
    parts = {
        "forward_kernel": ("y", y, y64),
        "backward_mixed_kernel": ("dweight", dweight, dweight64),
        "backward_rows_kernel": ("dx", dx[~shared], dx64[~shared]),
        "backward_shared_kernel": ("dx of shared rows", dx[shared], dx64[shared]),
    }
    return list(_conv_checks(parts, BOUNDS[need.dtype]))


def _conv_checks(parts: dict[str, tuple[str, Tensor, Tensor]], bound: float) -> Iterator[Check]:
    for kernel, (name, found, wanted) in parts.items():
        error = relative_error(found, wanted)
        fix = "its blocks are fixed, so the compiler is to blame: install the triton version of the README"
        about = f"{name} is {error:.1e} from float64"
        yield Check(f"conv kernel {kernel}", error <= bound, about, fix, {name: error}, bound)
