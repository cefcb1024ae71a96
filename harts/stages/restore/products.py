"""Matrix products with the LM head, accumulated in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.backends.linear.dtypes import wide_dtype


def operand(x: Tensor, *others: Tensor) -> Tensor:
    """What a product with others takes of x: as it is where a GPU multiplies 16-bit numbers, else in the wide dtype."""
    return x if _native(x, *others) else x.to(wide_dtype(x, *others))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two matrices of `operand`, in float32 or wider: 16-bit products are summed and kept in float32.

    Autocast, which would round to 16 bits, changes nothing.
    """
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b, out_dtype=torch.float32) if _native(a, b) else a @ b


def _native(*operands: Tensor) -> bool:
    dtypes = {each.dtype for each in operands}
    return len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} and all(each.is_cuda for each in operands)
