"""Log-probs and entropies by plain log_softmax of every position, and a watch over the size of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harts.stages.restore.labels import Predictions


def plain(hidden: Tensor, weight: Tensor, positions: Predictions) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T)[torch.from_numpy(positions.row)]
    if positions.inverse_temperature is not None:
        logits = logits * torch.from_numpy(positions.inverse_temperature)[:, None]
    logp = logits.log_softmax(dim=1)
    return logp[torch.arange(len(logp)), torch.from_numpy(positions.target)], -(logp.exp() * logp).sum(dim=1)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return out
