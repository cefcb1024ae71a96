"""Random weights to begin with: each parameter has its own generator, so they are alike however a model is split."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor, nn

from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.parts import EXPERTS, Part

OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight", "experts.down")
"""What is added to the residual stream; smaller by sqrt(2 * layers)."""


def initialise(parts: Iterable[tuple[Part, nn.Parameter]], config: MegatronConfig) -> None:
    """Draw weights on the host; vectors of norms stay ones."""
    for part, parameter in parts:
        with torch.no_grad():
            if part.name.endswith(EXPERTS):
                for place, one in enumerate(parameter, start=part.index * len(parameter)):
                    one.copy_(_weight(f"{part.name}.{place}", tuple(one.shape), config))
            elif _drawn(part):
                parameter.copy_(part.cut(_weight(part.name, part.shape, config)))


def _drawn(part: Part) -> bool:
    return len(part.shape) > 1 or part.name.endswith(("a_log", "dt_bias"))


def _weight(name: str, shape: tuple[int, ...], config: MegatronConfig) -> Tensor:
    """Decay rates from 1 to 16, steps from 0.001 to 0.1, convolutions as torch draws them, others normal."""
    draw = torch.Generator().manual_seed(
        int.from_bytes(blake2b(f"{config.seed} {name}".encode(), digest_size=7).digest())
    )
    weight = torch.empty(shape)
    if name.endswith("a_log"):
        return weight.uniform_(1.0, 16.0, generator=draw).log()
    if name.endswith("dt_bias"):
        step = torch.pow(10.0, weight.uniform_(-3.0, -1.0, generator=draw))
        return step + torch.log(-torch.expm1(-step))  # softplus of it is the step
    if name.endswith(".conv"):
        bound = config.conv_width**-0.5
        return weight.uniform_(-bound, bound, generator=draw)
    std = config.init_std
    if any(each in name for each in OUTPUTS):
        std /= math.sqrt(2.0 * config.layers)
    return weight.normal_(0.0, std, generator=draw)
