"""Parameters with a seeded start: no module here touches torch's global random state."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional


class Draw:
    """Random initial values from one seed. Drawn in float64 on the host, so all dtypes and devices start alike."""

    def __init__(self, seed: int, std: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.std = std

    def normal(self, parameter: Tensor) -> None:
        """Fill with a normal distribution of the model's standard deviation."""
        values = torch.randn(parameter.shape, dtype=torch.float64, generator=self.generator)
        parameter.copy_(values * self.std)

    def uniform(self, parameter: Tensor, low: float, high: float) -> Tensor:
        """Uniform float64 values of a parameter's shape."""
        return torch.rand(parameter.shape, dtype=torch.float64, generator=self.generator) * (high - low) + low


class Seeded(nn.Module, ABC):
    """A module that fills its own parameters."""

    @abstractmethod
    def reset(self, draw: Draw) -> None:
        """Fill the parameters that belong to this module itself, not to modules inside it."""


def initialise(module: nn.Module, draw: Draw) -> None:
    """Fill all parameters of a module tree, in the order of its modules."""
    with torch.no_grad():
        for each in module.modules():
            if isinstance(each, Seeded):
                each.reset(draw)


class Projection(Seeded):
    """x W^T without a bias; weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def reset(self, draw: Draw) -> None:  # noqa: D102
        draw.normal(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] to [R, out]."""
        return functional.linear(x, self.weight)


class Embedding(Seeded):
    """One vector a token; weight [vocabulary, hidden]."""

    def __init__(self, tokens: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width, dtype=dtype))

    def reset(self, draw: Draw) -> None:  # noqa: D102
        draw.normal(self.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[R] to [R, hidden]."""
        return functional.embedding(input_ids, self.weight)
