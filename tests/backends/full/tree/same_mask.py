"""The mask of `tree` under another name, so that the library runs it in its own order. Importing this needs
`flash-attn-4`."""

from __future__ import annotations

from typing import Any

from cutlass import cute

from harts.backends.full.tree.kernel import sees


@cute.jit  # type: ignore[untyped-decorator]
def sees_as_before(  # noqa: PLR0917  (as it is called)
    batch: Any, head: Any, query: Any, key: Any, seqlen: Any, tensors: Any, scalars: Any
) -> Any:
    return sees(batch, head, query, key, seqlen, tensors, scalars)
