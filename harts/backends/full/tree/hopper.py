"""How FlashAttention 4.0.0b36 runs lists of tiles on compute capability 9.0, made faster. Importing this needs
`flash-attn-4`.

Backward, its loop reads the number of the next tile from memory, compares it with the number of tiles, and only then
begins to multiply: tensor cores wait for one answer of the memory each tile. The lists of a plan name no tile past the
end, and a tile that is seen whole is masked without its number. So here nothing is compared, the number of a tile that
is seen in part is read while the one before it is computed, and that of a whole one is not read.

Forward, it begins with the first queries, which see the least, and the longest tiles end alone. Here it begins with
the last ones. Either way every tile is computed as before: outputs keep their bits, as do those gradients that the
library sums in a fixed order.

The library offers no place for either, so its loop and its scheduler are replaced by ones that do as before for all
kernels but those with the mask of `run_as_here`, and those compiled in `longest_first`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler

_last_first = ContextVar("_last_first", default=False)


def run_as_here(ours: Callable[..., Any]) -> None:
    """Have backward kernels with the mask `ours` walk their lists as here, and forward kernels that are compiled in
    `longest_first` begin with the last queries. Kernels whose tiles are parts of the listed ones walk as before.

    Raises:
        AttributeError: the installed version of the library has no such loop, or no such scheduler.
    """
    _walk_lists_of(ours)
    _order_tiles()


@contextmanager
def longest_first() -> Iterator[None]:
    """Have forward kernels that this thread compiles meanwhile begin with the last queries, unless they are causal."""
    before = _last_first.set(True)
    try:
        yield
    finally:
        _last_first.reset(before)


def _walk_lists_of(ours: Callable[..., Any]) -> None:
    theirs = flash_bwd_sm90.consume_block_sparse_mma_bwd_sm90

    def consume(  # noqa: PLR0917  (as it is called)
        lists: Any,
        batch: Any,
        head: Any,
        keys: Any,
        state_q: Any,
        state_do: Any,
        step: Any,
        mask: Any,
        mask_mod: Any,
        **settings: Any,
    ) -> Any:
        place, states = (batch, head, keys), (state_q, state_do)
        if mask_mod is not ours or settings["q_subtile_factor"] != 1:
            return theirs(lists, *place, *states, step, mask, mask_mod, **settings)
        past_end = partial(
            mask.apply_mask,
            batch_idx=batch,
            head_idx=head,
            n_block=keys,
            thr_mma=settings["thr_mma_SdP"],
            mask_seqlen=True,
            mask_causal=False,
            aux_data=settings["aux_data"],
        )
        add = partial(step, score_mod_fn=settings["score_mod_fn"], score_mod_bwd_fn=settings["score_mod_bwd_fn"])
        return _walk_both(lists, place, states, add=add, past_end=past_end, mask_mod=mask_mod)

    flash_bwd_sm90.consume_block_sparse_mma_bwd_sm90 = consume


@cute.jit  # type: ignore[untyped-decorator]
def _walk_both(lists: Any, place: Any, states: Any, *, add: Any, past_end: Any, mask_mod: Any) -> Any:
    """Compute the tiles that are seen in part, then those that are seen whole.

    Args:
        lists: counts and numbers of either kind, [1, 1, M] and [1, 1, M, W].
        place: which sequence, head and tile of keys.
        states: of both pipelines.
        add: adds one tile to the gradients.
        past_end: masks keys past the last row, and by `mask_mod` if it is given.
        mask_mod: of tiles that are seen in part.
    """
    some, some_tiles, whole, whole_tiles, *_ = lists
    in_part = partial(past_end, mask_mod=mask_mod)
    states, begun = _walk(some[place], some_tiles[(*place, None)], states, False, add=add, mask=in_part)
    states, _ = _walk(whole[place], whole_tiles[(*place, None)], states, begun, add=add, mask=past_end)
    return states


@cute.jit  # type: ignore[untyped-decorator]
def _walk(count: Any, tiles: Any, states: Any, begun: Any, *, add: Any, mask: Any) -> Any:
    """Compute the tiles of one list.

    Args:
        count: of the list.
        tiles: their numbers, [W].
        states: of both pipelines.
        begun: whether the gradients hold a tile already.
        add: adds one tile to the gradients.
        mask: of the scores of a tile.
    """
    tile = tiles[0]
    for i in cutlass.range(count, unroll=1):
        following = tiles[cutlass.min(i + 1, count - 1)]
        states = add(tile, *states, mask_fn=mask, dKV_accumulate=begun)
        begun = True
        tile = following
    return states, begun


def _order_tiles() -> None:
    theirs: Any = flash_fwd_sm90.SingleTileScheduler

    class Ordered(theirs):  # type: ignore[misc]
        """Tiles of queries from the last to the first one, head after head, in `longest_first`; otherwise as before."""

        @staticmethod
        def create(params: Any, state: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            if not _last_first.get():
                return theirs.create(params, state, loc=loc, ip=ip)
            tile, head, batch = cute.arch.block_idx()
            return SingleTileScheduler(params, (params.num_block - 1 - tile, head, batch), loc=loc, ip=ip)

    flash_fwd_sm90.SingleTileScheduler = Ordered
