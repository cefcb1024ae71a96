"""Models in float64 throughout, for comparisons that rounding must not hide."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """While it is active, whatever asks for float32 gets float64.

    Models of transformers cast to float32 in norms, softmax, gates, rotations and routers, whatever their dtype. A
    model in float64 would have float32's error, and in gradients that are much smaller than others no correct digit.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = [_wide(each) for each in args]
        return func(*wide, **{name: _wide(each) for name, each in (kwargs or {}).items()})


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What a model of a dtype runs in."""
    return Widened() if dtype == torch.float64 else nullcontext()


def recomputation(dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of gradient checkpointing: layers are computed again as they were, without reentrance."""
    if dtype != torch.float64:
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": _widened_again}


def _widened_again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed layer: forward has the call's, recomputation one of its own."""
    return nullcontext(), Widened()
