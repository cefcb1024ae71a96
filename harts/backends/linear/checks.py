"""What the torch reference backends can serve, and the checks of one packed call."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

from torch import Tensor

from harts.backends.base import Need, Rule
from harts.backends.linear.dtypes import wide_dtype
from harts.backends.plan_tensors import PackedCall


def why_not(need: Need) -> list[str]:
    """Every reason why the reference backends cannot serve `need`; empty if they can."""
    query_heads, value_heads = need.linear_heads
    found = []
    if need.rule not in get_args(Rule):
        found.append(f"the rule {need.rule!r} is not one of {', '.join(get_args(Rule))}")
    if not need.dtype.is_floating_point:
        found.append(f"the dtype {need.dtype} is not a floating-point type")
    if query_heads < 1 or value_heads < 1 or value_heads % query_heads:
        found.append(f"{value_heads} value heads are not a multiple of {query_heads} query heads")
    if min(need.linear_head_dims) < 1:
        found.append(f"the head dims {need.linear_head_dims} are not positive")
    if need.chunk_size < 1:
        found.append(f"the chunk size {need.chunk_size} is not positive")
    return found


def check_call(rows: dict[str, Tensor], packed: PackedCall, initial_state: Tensor) -> None:
    """Check one packed call against the contract of `LinearAttention.call`; what is in `packed` only once.

    Shapes of q, k, g and beta are the delta rules'; of other inputs only the number of rows is checked.

    Raises:
        ValueError: the first fault, with sequence and numbers.
    """
    total = check_rows(rows)
    sequences, end = packed.once("checked", lambda: _check_packed(packed))
    if end != total:
        raise ValueError(f"cu_seqlens: runs from 0 to {end}, the rows are 0 to {total}")
    wanted = (sequences, rows["v"].shape[1], rows["k"].shape[2], rows["v"].shape[2])
    if tuple(initial_state.shape) != wanted:
        raise ValueError(f"initial_state: has shape {tuple(initial_state.shape)}, needed is {wanted}")
    if wide_dtype(initial_state) != initial_state.dtype:
        raise ValueError(f"initial_state: is {initial_state.dtype}, needed is float32 or wider")


def _check_packed(packed: PackedCall) -> tuple[int, int]:
    """Number of sequences, and of rows."""
    bounds = packed.cu_seqlens.tolist()
    if len(bounds) < 2:
        raise ValueError("cu_seqlens: a call needs at least one sequence")
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: starts at {bounds[0]}, not at 0")
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if end == begin:
            raise ValueError(f"cu_seqlens: sequence {index} has no rows ({begin}:{end})")
        if end < begin:
            raise ValueError(f"cu_seqlens: sequence {index} ends at {end}, before its start {begin}")
    requested = zip(packed.state_sequence.tolist(), packed.state_offset.tolist(), strict=True)
    for index, (sequence, offset) in enumerate(requested):
        if not 0 <= sequence < len(bounds) - 1:
            raise ValueError(f"state_sequence: state {index} is of sequence {sequence}, there are {len(bounds) - 1}")
        length = bounds[sequence + 1] - bounds[sequence]
        if not 0 <= offset <= length or (offset % packed.chunk_size and offset != length):
            raise ValueError(
                f"state_offset: state {index} is after {offset} tokens of sequence {sequence}; allowed are multiples "
                f"of the chunk size {packed.chunk_size} up to its length {length}, and that length"
            )
    return len(bounds) - 1, bounds[-1]


def check_rows(rows: dict[str, Tensor]) -> int:
    """Check the shapes of rows of one call or microbatch, and count them.

    Raises:
        ValueError: the first fault, with the input and numbers.
    """
    total, value_heads, _ = rows["v"].shape
    _, heads, key_dim = rows["k"].shape
    if value_heads % heads:
        raise ValueError(f"v: has {value_heads} heads, not a multiple of the {heads} of k")
    gates: list[tuple[int, ...]] = [(total, value_heads), (total, value_heads, key_dim)]
    keys: list[tuple[int, ...]] = [(total, heads, key_dim)]
    allowed = {"q": keys, "k": keys, "g": gates, "beta": gates[:1]}
    for name, x in rows.items():
        shape = tuple(x.shape)
        if name in allowed and shape not in allowed[name]:
            raise ValueError(f"{name}: has shape {shape}, needed is {' or '.join(map(str, allowed[name]))}")
        if len(x) != total:
            raise ValueError(f"{name}: has {len(x)} rows, v has {total}")
    return total
