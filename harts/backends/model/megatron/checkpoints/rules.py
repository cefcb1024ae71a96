"""How tensors of a Megatron model are made from those of a checkpoint.

A rule is linear in its tensors, so it maps gradients as it maps weights. Shape suffixes: E experts, I hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harts.errors import ConfigError

if TYPE_CHECKING:
    from harts.backends.model.megatron.config import MegatronConfig

Shape = tuple[int, ...]
SHOWN = 5
"""Faults of a kind that are named."""


@dataclass(frozen=True)
class Rule:
    """One tensor of the model, whole, as one process has it."""

    target: str
    """Its name in the model."""
    sources: Mapping[str, Shape]
    """Names and shapes in the checkpoint, in the order of `make`'s arguments."""
    make: Callable[..., Tensor]
    """The tensor from the sources."""


@dataclass(frozen=True)
class Family:
    """Checkpoints of one `model_type`."""

    fields_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Fields of `MegatronConfig` that have the shape of a config.json; raises what cannot be served."""
    rules_of: Callable[[MegatronConfig], list[Rule]]
    """All tensors of a model, from the names of files."""
    filed: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """Tensors of transformers' model under the names of files; those stay what they are."""
    beyond: Callable[[Mapping[str, Any]], tuple[str, ...]]
    """Beginnings of names in files that are of the prediction of further tokens, by config.json."""


def copied(target: str, source: str, *shape: int) -> Rule:
    """A tensor that is the same in both."""
    return Rule(target, {source: shape}, lambda tensor: tensor)


def by_head(heads: int, *parts: Tensor) -> Tensor:
    """Rows of several weights, head after head: of each head its rows of the first weight, of the second, ..."""
    return torch.cat([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def check(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> None:
    """Check that a checkpoint has every tensor that is needed, and no other.

    Args:
        rules: of a model.
        shapes: of the checkpoint's tensors.

    Raises:
        ConfigError: tensors are missing, have another shape, or are used by no rule; it names them.
    """
    wanted = {name: shape for rule in rules for name, shape in rule.sources.items()}
    faults = [_few("lacks", sorted(set(wanted) - set(shapes)))]
    faults += [_few("has, but the model does not use,", sorted(set(shapes) - set(wanted)))]
    wrong = [name for name in sorted(set(wanted) & set(shapes)) if tuple(shapes[name]) != wanted[name]]
    faults += [_few("has other shapes:", [f"{each} {tuple(shapes[each])}, not {wanted[each]}" for each in wrong])]
    if any(faults):
        raise ConfigError("\n".join(f"model: checkpoint: it {fault}" for fault in faults if fault))


def _few(what: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(names[:SHOWN])}{more}" if names else ""


def outer_rules(config: MegatronConfig, embedding: str) -> list[Rule]:
    """Embedding, last norm and LM head."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    return [
        copied("embedding.word_embeddings.weight", embedding, vocabulary, hidden),
        copied("decoder.final_layernorm.weight", "model.norm.weight", hidden),
        copied("output_layer.weight", "lm_head.weight", vocabulary, hidden),
    ]


def layer_rules(config: MegatronConfig, index: int) -> list[Rule]:
    """Norms and dense MLP of a layer; `expert_rules` are of a layer with experts."""
    mine, theirs, hidden = f"decoder.layers.{index}.", f"model.layers.{index}.", config.hidden_size
    norms = [
        copied(f"{mine}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden),
        copied(f"{mine}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", hidden),
    ]
    if config.moe is None or index < config.moe.dense_layers:
        return norms + mlp_rules(f"{mine}mlp.", f"{theirs}mlp.", hidden, config.intermediate_size)
    return norms


def mlp_rules(mine: str, theirs: str, hidden: int, units: int) -> list[Rule]:
    """A gated MLP; Megatron has the gate's rows first."""
    inputs = {f"{theirs}{name}_proj.weight": (units, hidden) for name in ("gate", "up")}
    return [
        Rule(f"{mine}linear_fc1.weight", inputs, lambda gate, up: torch.cat([gate, up])),
        copied(f"{mine}linear_fc2.weight", f"{theirs}down_proj.weight", hidden, units),
    ]


def expert_rules(config: MegatronConfig, index: int, shared: str) -> list[Rule]:
    """Router weight, routed experts, and the shared expert, which the checkpoint calls `shared`; none of a dense layer.

    The checkpoint has [I, hidden] and [hidden, I] of each expert, the model [E, hidden, 2 * I] and [E, I, hidden].
    """
    moe, hidden = config.moe, config.hidden_size
    if moe is None or index < moe.dense_layers:
        return []
    mine, theirs, units = f"decoder.layers.{index}.mlp.", f"model.layers.{index}.mlp.", moe.intermediate_size
    of_expert = [f"{theirs}experts.{expert}." for expert in range(moe.experts)]
    inputs = {f"{each}{name}_proj.weight": (units, hidden) for each in of_expert for name in ("gate", "up")}
    outputs = {f"{each}down_proj.weight": (hidden, units) for each in of_expert}
    return [
        copied(f"{mine}router.weight", f"{theirs}gate.weight", moe.experts, hidden),
        Rule(f"{mine}experts.gate_up", inputs, lambda *each: torch.stack(each).reshape(len(each) // 2, -1, hidden).mT),
        Rule(f"{mine}experts.down", outputs, lambda *each: torch.stack(each).mT),
        *mlp_rules(f"{mine}shared_experts.", f"{theirs}{shared}.", hidden, moe.shared_intermediate_size),
    ]


def one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts that transformers has packed, one after another as files have them."""
    found: dict[str, Tensor] = {}
    for name, each in tensors.items():
        if name.endswith(".mlp.experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, (gate, up) in enumerate(part.chunk(2) for part in each):
                found |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            found |= {f"{prefix}{expert}.down_proj.weight": down for expert, down in enumerate(each)}
        else:
            found[name] = each
    return found
