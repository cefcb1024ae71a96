"""Models of transformers as models of Megatron-core: configuration and weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harts.backends.model.megatron.checkpoints.folder import Tensors, described, family_of
from harts.backends.model.megatron.checkpoints.rules import check
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.parts import Part
from harts.errors import ConfigError


def config_of(values: Mapping[str, Any], **chosen: Any) -> MegatronConfig:
    """The configuration with the shape of a config.json.

    Args:
        values: of it, `model_type` among them.
        chosen: further fields.

    Raises:
        ConfigError: the shape cannot be served; it names all that is in the way.
    """
    return MegatronConfig(**family_of(values).fields_of(values), **chosen)


def weights_of(tensors: Mapping[str, Tensor], config: MegatronConfig, model_type: str) -> dict[str, Tensor]:
    """Tensors of the Megatron model from those of a checkpoint. The map is linear: it maps gradients as well.

    Args:
        tensors: all of them, under the names of transformers' `state_dict` or those of files.
        config: of the model.
        model_type: of transformers.

    Returns:
        Whole tensors under the names of the model in one process, parameters and selection biases.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is not used; it names them.
    """
    family = family_of({"model_type": model_type})
    rules, filed = family.rules_of(config), family.filed(tensors)
    check(rules, {name: tuple(each.shape) for name, each in filed.items()})
    return {rule.target: rule.make(*(filed[name] for name in rule.sources)) for rule in rules}


def weights_in(folder: str, config: MegatronConfig) -> Iterator[tuple[str, Tensor]]:
    """As `weights_of`, of the files of a folder, one tensor after another. What predicts further tokens is left out.

    Raises:
        ConfigError: as `weights_of`, or a file cannot be read.
    """
    values = described(folder)
    family, tensors = family_of(values), Tensors(folder)
    rules, beyond = family.rules_of(config), family.beyond(values)
    check(rules, {name: shape for name, shape in tensors.shapes.items() if not name.startswith(beyond)})
    for rule in rules:
        yield rule.target, rule.make(*(tensors[name] for name in rule.sources))


def load(parts: Iterable[tuple[Part, Tensor]], buffers: Mapping[str, Tensor], config: MegatronConfig) -> None:
    """Overwrite the weights of a model, which has the shape of its configuration, by those of `config.checkpoint`.

    Args:
        parts: parameters of this process, which may be a part of the model.
        buffers: what else is kept with the model.
        config: of the model.

    Raises:
        ConfigError: as `weights_in`, or an override gives the model tensors that a checkpoint does not have.
    """
    assert config.checkpoint is not None
    mine = {part.name: (part.shape, each, part.cut) for part, each in parts}
    mine |= {name: (tuple(each.shape), each, lambda whole: whole) for name, each in buffers.items()}
    with torch.no_grad():
        for name, whole in weights_in(config.checkpoint, config):
            shape, target, cut = mine.pop(name, (None, None, None))
            if target is None and config.parallel.pipeline > 1:
                continue
            if target is None or cut is None or shape != whole.shape:
                has = "no such tensor" if shape is None else f"{shape}"
                raise ConfigError(f"model: checkpoint: {name} is {tuple(whole.shape)}, the model has {has}")
            target.copy_(cut(whole))
    if mine:
        raise ConfigError(f"model: checkpoint: nothing in it is for {', '.join(sorted(mine))}")
