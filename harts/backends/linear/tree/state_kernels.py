"""Triton kernels of the state recurrence, the only part of the delta rule in which chunks depend on each other.

A sequence is a few chunks of gathered rows (its head: replay rows, and own rows up to the next chunk boundary), then
chunks of compact rows in place (its body). Every tensor of rows or chunks therefore comes in two buffers; tables say
where the chunks of a sequence are, in spans that end where the buffer changes or a state is asked for (see `table`).
States live in a bank of float32 tiles [K, V].

One program walks all chunks of one sequence for one value head and BV value channels. All sequences run the same
compiled code (a zero start is a masked load), so that the bits of a chunk do not depend on what it is part of. The loop
over the chunks of a span has no branch and no indirect load in it, so that its loads are prefetched.

One launch runs the sequences of all rounds: a program waits for the state that it starts from (backwards: for the
gradients of the states that it has produced) on a counter of its own head and channels. Programs start in the order of
their numbers, and what a program waits for always has a lower number, so that a waiting program never keeps its
producer from starting. Counters order memory and never add values: sums run over a list, in its order.

K, V are head dims, H the heads of q and k here, HV value heads. Gates are cumulative over their chunk, in log2.
"""
# Triton's language is not typed, and kernels take the arrays that they take:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0912, PLR0915, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from harts.backends.linear.tree import grid, table

BT = tl.constexpr(grid.CHUNK)
_SEQUENCE_COLUMNS = tl.constexpr(table.SEQUENCE_COLUMNS)
_SPANS_BEGIN = tl.constexpr(table.SPANS_BEGIN)
_SPANS_END = tl.constexpr(table.SPANS_END)
_SOURCE = tl.constexpr(table.SOURCE)
_PLACE = tl.constexpr(table.PLACE)
_SPAN_COLUMNS = tl.constexpr(table.SPAN_COLUMNS)
_IN_HEAD = tl.constexpr(table.IN_HEAD)
_ROW = tl.constexpr(table.ROW)
_END = tl.constexpr(table.END)
_CHUNK = tl.constexpr(table.CHUNK)
_SLOT = tl.constexpr(table.SLOT)


@triton.jit(do_not_specialize=["given"])
def forward_states_kernel(
    w,
    w_head,
    u,
    u_head,
    k,
    k_head,
    g,
    g_head,
    errors,
    errors_head,
    states,
    states_head,
    bank,
    done,
    sequences,
    spans,
    given,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SCALAR_GATE: tl.constexpr,
    WRITE: tl.constexpr,
):
    """S_c+1 = decay_c S_c + k_c^T e_c with errors e_c = u_c - w_c S_c; stores S_c (before each chunk) and e_c."""
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (V + BV - 1) // BV
    head = (program // blocks) % HV
    sequence = sequences + (program // blocks // HV) * _SEQUENCE_COLUMNS
    source = tl.load(sequence + _SOURCE)

    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    o_v = (program % blocks).to(tl.int32) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    tile = o_k[:, None] * V + o_v[None, :]
    m_tile = m_k[:, None] & m_v[None, :]
    counter = head * blocks + program % blocks
    if WRITE and source >= given:
        while tl.atomic_add(done + source * HV * blocks + counter, 0, sem="acquire") == 0:
            pass
    b_state = tl.load(bank + (source * HV + head) * K * V + tile, mask=m_tile & (source >= 0), other=0.0)
    for number in range(tl.load(sequence + _SPANS_BEGIN), tl.load(sequence + _SPANS_END)):
        span = spans + number * _SPAN_COLUMNS
        in_head, row, end = tl.load(span + _IN_HEAD) > 0, tl.load(span + _ROW), tl.load(span + _END)
        chunk, slot = tl.load(span + _CHUNK), tl.load(span + _SLOT)
        p_w = tl.where(in_head, w_head, w) + (row * HV + head) * K
        p_u = tl.where(in_head, u_head, u) + (row * HV + head) * V
        p_errors = tl.where(in_head, errors_head, errors) + (row * HV + head) * V
        p_k = tl.where(in_head, k_head, k) + (row * H + head // (HV // H)) * K
        p_states = tl.where(in_head, states_head, states) + (chunk * HV + head) * K * V
        if SCALAR_GATE:
            p_g = tl.where(in_head, g_head, g) + row * HV + head
        else:
            p_g = tl.where(in_head, g_head, g) + (row * HV + head) * K
        rows = (end - row).to(tl.int32)
        if not SCALAR_GATE:
            b_last = tl.load(p_g + (tl.minimum(BT, rows) - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
        for i in range(tl.cdiv(rows, BT)):
            t = i * BT + o_t
            m_t = t < rows
            tile_u = t[:, None] * (HV * V) + o_v[None, :]
            tl.store(p_states + tile, b_state.to(states.dtype.element_ty), mask=m_tile)
            if SCALAR_GATE:
                b_last = tl.load(p_g + (tl.minimum((i + 1) * BT, rows) - 1) * HV)
                b_g = tl.load(p_g + t * HV, mask=m_t, other=0.0)
            else:  # of the next chunk: asked for one chunk ahead, since nothing else would hide its latency
                b_next = tl.load(p_g + (tl.minimum((i + 2) * BT, rows) - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
            b_w = tl.load(p_w + t[:, None] * (HV * K) + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_u = tl.load(p_u + tile_u, mask=m_t[:, None] & m_v[None, :], other=0.0)
            b_errors = b_u - tl.dot(b_w, b_state.to(b_w.dtype))
            tl.store(p_errors + tile_u, b_errors.to(errors.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])

            if SCALAR_GATE:
                b_errors *= tl.where(m_t, tl.exp2(b_last - b_g), 0.0)[:, None]
                b_state *= tl.exp2(b_last)
            else:
                b_state *= tl.exp2(b_last)[:, None]
                b_last = b_next
            b_k = tl.load(p_k + t[None, :] * (H * K) + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0.0)
            b_state = tl.dot(b_k, b_errors.to(b_k.dtype), b_state)
            p_states += HV * K * V
        if WRITE and slot >= 0:
            tl.store(bank + (slot * HV + head) * K * V + tile, b_state, mask=m_tile)
            tl.debug_barrier()
            tl.atomic_add(done + slot * HV * blocks + counter, 1, sem="release")


@triton.jit
def backward_states_kernel(
    q,
    q_head,
    k,
    k_head,
    w,
    w_head,
    g,
    g_head,
    do,
    do_head,
    de,
    de_head,
    dstates,
    dstates_head,
    dbank,
    dsource,
    done,
    consumers,
    sequences,
    spans,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SCALAR_GATE: tl.constexpr,
):
    """Walk back: stores dS after each chunk, adds to de (gradient of the errors, in place) and stores dS at the start.

    The gradients of a state that others start from, consumers[slot]:consumers[slot + 1] of `dsource`, are added before
    the chunks of its span: they belong to all of them.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (V + BV - 1) // BV
    head = (program // blocks) % HV
    sequence = sequences + (program // blocks // HV) * _SEQUENCE_COLUMNS
    begin, stop = tl.load(sequence + _SPANS_BEGIN), tl.load(sequence + _SPANS_END)
    source, place = tl.load(sequence + _SOURCE), tl.load(sequence + _PLACE)
    counter = head * blocks + program % blocks

    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    o_v = (program % blocks).to(tl.int32) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    tile = o_k[:, None] * V + o_v[None, :]
    m_tile = m_k[:, None] & m_v[None, :]
    b_dstate = tl.zeros([BK, BV], dtype=tl.float32)
    for back in range(stop - begin):
        span = spans + (stop - 1 - back) * _SPAN_COLUMNS
        in_head, row, end = tl.load(span + _IN_HEAD) > 0, tl.load(span + _ROW), tl.load(span + _END)
        chunk, slot = tl.load(span + _CHUNK), tl.load(span + _SLOT)
        if slot >= 0:
            if dbank is not None:
                b_dstate += tl.load(dbank + (slot * HV + head) * K * V + tile, mask=m_tile, other=0.0)
            first, last = tl.load(consumers + slot), tl.load(consumers + slot + 1)
            while tl.atomic_add(done + slot * HV * blocks + counter, 0, sem="acquire") < last - first:
                pass
            for consumer in range(first, last):
                b_dstate += tl.load(dsource + (consumer * HV + head) * K * V + tile, mask=m_tile, other=0.0)
        rows = (end - row).to(tl.int32)
        chunks = tl.cdiv(rows, BT)
        o_q = (row * H + head // (HV // H)) * K
        p_q, p_k = tl.where(in_head, q_head, q) + o_q, tl.where(in_head, k_head, k) + o_q
        p_w = tl.where(in_head, w_head, w) + (row * HV + head) * K
        p_do = tl.where(in_head, do_head, do) + (row * HV + head) * V
        p_de = tl.where(in_head, de_head, de) + (row * HV + head) * V
        p_dstates = tl.where(in_head, dstates_head, dstates) + ((chunk + chunks - 1) * HV + head) * K * V
        if SCALAR_GATE:
            p_g = tl.where(in_head, g_head, g) + row * HV + head
        else:
            p_g = tl.where(in_head, g_head, g) + (row * HV + head) * K
        if not SCALAR_GATE:
            b_last = tl.load(p_g + (rows - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
        for step in range(chunks):
            i = chunks - 1 - step
            t = i * BT + o_t
            m_t = t < rows
            m_tv, m_kt = m_t[:, None] & m_v[None, :], m_k[:, None] & m_t[None, :]
            tile_v = t[:, None] * (HV * V) + o_v[None, :]
            tl.store(p_dstates + tile, b_dstate.to(dstates.dtype.element_ty), mask=m_tile)
            b_before = tl.load(p_de + tile_v, mask=m_tv, other=0.0)
            if SCALAR_GATE:
                b_last = tl.load(p_g + (tl.minimum((i + 1) * BT, rows) - 1) * HV)
                b_g = tl.load(p_g + t * HV, mask=m_t, other=0.0)
            else:  # of the chunk before: asked for one chunk ahead, since nothing else would hide its latency
                b_next = tl.load(p_g + (tl.maximum(i * BT, 1) - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
            b_k = tl.load(p_k + t[:, None] * (H * K) + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_q = tl.load(p_q + t[None, :] * (H * K) + o_k[:, None], mask=m_kt, other=0.0)
            b_w = tl.load(p_w + t[None, :] * (HV * K) + o_k[:, None], mask=m_kt, other=0.0)
            b_do = tl.load(p_do + tile_v, mask=m_tv, other=0.0)
            b_de = tl.dot(b_k, b_dstate.to(b_k.dtype))
            if SCALAR_GATE:
                b_de *= tl.where(m_t, tl.exp2(b_last - b_g), 0.0)[:, None]
                b_dstate *= tl.exp2(b_last)
                b_q = (b_q * tl.exp2(b_g)[None, :]).to(b_q.dtype)
            else:
                b_dstate *= tl.exp2(b_last)[:, None]
                b_last = b_next
            b_de -= (
                -b_before
            )  # a sum would make it the accumulator of the product, and its load would not be prefetched
            tl.store(p_de + tile_v, b_de.to(de.dtype.element_ty), mask=m_tv)
            b_dstate += tl.dot(b_q, b_do) * scale - tl.dot(b_w, b_de.to(b_w.dtype))
            p_dstates -= HV * K * V
    if source >= 0:
        tl.store(dsource + (place * HV + head) * K * V + tile, b_dstate, mask=m_tile)
        tl.debug_barrier()
        tl.atomic_add(done + source * HV * blocks + counter, 1, sem="release")
