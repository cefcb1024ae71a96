"""Which part of the whole model's parameters a process has, and how parts become whole again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.processes import Groups

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""A row a token, and rows that nothing is computed from up to a multiple of tensor parallelism."""
TWO_BLOCKS = "linear_fc1.weight"
"""Gates, then ups: each is split by itself."""
EXPERTS = ("experts.gate_up", "experts.down")


@dataclass(frozen=True)
class Part:
    """What one process has of one parameter."""

    name: str
    """Of the parameter in a model of one process."""
    shape: tuple[int, ...]
    """Of the whole."""
    dim: int | None
    """Dimension that is split; none if the process has the whole."""
    index: int
    count: int
    blocks: int
    """The dimension is so many blocks, each split by itself."""
    leads_tensor: bool
    """Whether it is the first of the tensor-parallel processes with equal copies."""
    replica: int
    """Number of this process among those that have the same part and compute other rows."""
    replicas: int

    @property
    def leads(self) -> bool:
        """Whether it is the first of all processes with equal copies."""
        return self.leads_tensor and self.replica == 0

    def cut(self, whole: Tensor) -> Tensor:
        """This process's part; rows beyond the whole's are zeros."""
        if self.dim is None:
            return whole
        blocks = [self._padded(block).chunk(self.count, self.dim)[self.index] for block in self._blocks(whole)]
        return torch.cat(blocks, self.dim)

    def _blocks(self, x: Tensor) -> tuple[Tensor, ...]:
        assert self.dim is not None
        return x.chunk(self.blocks, self.dim)

    def _padded(self, block: Tensor) -> Tensor:
        assert self.dim is not None
        missing = -block.shape[self.dim] % self.count
        if not missing:
            return block
        shape = list(block.shape)
        shape[self.dim] = missing
        return torch.cat([block, block.new_zeros(shape)], self.dim)


def joined(parts: Iterable[tuple[Part, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors by name, from the parts that all processes have.

    Raises:
        ValueError: a part is missing.
    """
    by_name: dict[str, dict[int, tuple[Part, Tensor]]] = {}
    for part, tensor in parts:
        if part.leads:
            by_name.setdefault(part.name, {})[part.index] = part, tensor
    return {name: _join(name, found) for name, found in by_name.items()}


def _join(name: str, found: dict[int, tuple[Part, Tensor]]) -> Tensor:
    part = found[min(found)][0]
    if part.dim is None:
        return found[0][1]
    if sorted(found) != list(range(part.count)):
        raise ValueError(f"{name}: has parts {sorted(found)} of {part.count}")
    pieces = [found[index][1].chunk(part.blocks, part.dim) for index in range(part.count)]
    whole = torch.cat([piece[block] for block in range(part.blocks) for piece in pieces], part.dim)
    return whole.narrow(part.dim, 0, part.shape[part.dim])


def parts_of(module: Any, config: MegatronConfig, groups: Groups) -> Iterator[tuple[Part, torch.nn.Parameter]]:
    """Every parameter of this process's module, and which part it is."""
    for name, parameter in module.named_parameters():
        yield _part(_name(module, name), parameter, config, groups), parameter


def buffers_of(module: Any) -> dict[str, Tensor]:
    """What is no parameter and kept with a model, by its name in a model of one process. Every process has it whole."""
    parameters = dict(module.named_parameters())
    kept = {name: each for name, each in module.state_dict().items() if isinstance(each, Tensor)}
    return {_name(module, name): each for name, each in kept.items() if name not in parameters}


def number_of(module: Any, megatrons: int) -> int:
    """Number of a layer of the configuration, from Megatron's number of it or of its half. Both count from 1."""
    return -(-megatrons // int(module.sublayers))


def _name(module: Any, name: str) -> str:
    """Of a tensor of this process's layers, in a `GPTModel` of one process."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(number_of(module, module.decoder.layers[int(words[2])].layer_number) - 1)
    if words[:2] == ["decoder", "final_norm"]:  # so called in a `HybridModel`
        words[1] = "final_layernorm"
    return ".".join(words)


def _part(name: str, parameter: Tensor, config: MegatronConfig, groups: Groups) -> Part:
    shape = list(parameter.shape)
    if name.endswith(EXPERTS):
        shape[0] *= groups.ep.size()
        return Part(name, tuple(shape), 0, groups.ep.rank(), groups.ep.size(), 1, True, *_place(groups.expert_dp))
    ranks = groups.tp.size()
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Part(name, tuple(shape), None, 0, 1, 1, groups.tp.rank() == 0, *_place(groups.dp_cp))
    dim = int(parameter.partition_dim)  # type: ignore[attr-defined]  # Megatron sets it
    shape[dim] = config.vocab_size if name.endswith(VOCABULARY) else shape[dim] * ranks
    blocks = 2 if name.endswith(TWO_BLOCKS) else 1
    return Part(name, tuple(shape), dim, groups.tp.rank(), ranks, blocks, True, *_place(groups.dp_cp))


def _place(group: Any) -> tuple[int, int]:
    return group.rank(), group.size()
