"""Check the sharing that records declare. It never decides what is shared: the tokens do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harts.errors import InputError
from harts.ir import RolloutBatch
from harts.stages.ingest.lcp_sort import common_prefix


class Declared(NamedTuple):
    """A trajectory's claim that its first `shared` tokens are its parent's."""

    where: str
    name: str
    parent: str
    shared: int


def check_declared(batch: RolloutBatch, claims: Iterable[Declared]) -> None:
    """Hold every claim against the tokens. Sharing more than was declared is no fault.

    Raises:
        InputError: every claim that fails, with its trajectory, first differing index and both token ids.
    """
    index = {name: i for i, name in enumerate(batch.columns.names)}
    found = [
        f"{claim.where}: trajectory {claim.name!r}: {what}" for claim in claims for what in _wrong(batch, index, claim)
    ]
    if found:
        raise InputError("\n".join(found))


def _wrong(batch: RolloutBatch, index: dict[str, int], claim: Declared) -> Iterator[str]:
    if claim.parent not in index or claim.parent == claim.name:
        what = "the trajectory itself" if claim.parent == claim.name else "the id of no trajectory read"
        yield f"field parent: {claim.parent!r} is {what}"
        return
    offset = batch.columns.offset
    mine, theirs = (batch.tokens[offset[i] : offset[i + 1]] for i in (index[claim.name], index[claim.parent]))
    if claim.shared > min(len(mine), len(theirs)):
        yield (
            f"field shared_length: is {claim.shared}, the trajectory has {len(mine)} tokens and its parent "
            f"{claim.parent!r} {len(theirs)}"
        )
        return
    shared = common_prefix(mine, theirs)
    if shared < claim.shared:
        yield (
            f"field shared_length: is {claim.shared}, but token {shared} is {mine[shared]} here and {theirs[shared]} "
            f"in its parent {claim.parent!r}: they share {shared} tokens"
        )
