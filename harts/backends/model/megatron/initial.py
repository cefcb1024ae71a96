"""Random weights to begin with: each parameter has its own generator, so they are alike however a model is split."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor, nn

from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.parts import EXPERTS, Part

OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight", "experts.down")
"""What is added to the residual stream; smaller by sqrt(2 * layers)."""
THREADS = 16
"""Most weights that are drawn at a time; one of them has a second, in float32, while it is drawn."""


def initialise(parts: Iterable[tuple[Part, nn.Parameter]], config: MegatronConfig) -> None:
    """Draw weights on the host, several at a time; vectors of norms stay ones."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        for done in [threads.submit(draw) for draw in _draws(parts, config)]:
            done.result()


def _draws(parts: Iterable[tuple[Part, nn.Parameter]], config: MegatronConfig) -> Iterator[Callable[[], None]]:
    """A function a weight, which draws it. An expert's weight does not depend on which others are here."""
    for part, parameter in parts:
        if part.name.endswith(EXPERTS):
            for place, one in enumerate(parameter.detach(), start=part.index * len(parameter)):
                yield partial(_draw, one, f"{part.name}.{place}", tuple(one.shape), config)
        elif _drawn(part):
            yield partial(_draw, parameter.detach(), part.name, part.shape, config, part.cut)


def _draw(
    target: Tensor,
    name: str,
    shape: tuple[int, ...],
    config: MegatronConfig,
    cut: Callable[[Tensor], Tensor] | None = None,
) -> None:
    whole = _weight(name, shape, config)
    target.copy_(whole if cut is None else cut(whole))


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
