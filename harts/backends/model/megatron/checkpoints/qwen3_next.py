"""Qwen3-Next, `qwen3_next` in transformers: GDN, gated grouped-query attention, softmax routing, a gated shared expert.

Norms multiply by 1 + weight, as Megatron's do with its option; that of linear attention multiplies by its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harts.backends.model.megatron.checkpoints.rules import (
    Family,
    Rule,
    by_head,
    copied,
    expert_rules,
    layer_rules,
    one_by_one,
    outer_rules,
)
from harts.backends.model.megatron.checkpoints.settings import NEUTRAL, Settings

if TYPE_CHECKING:
    from harts.backends.model.megatron.config import MegatronConfig


def _fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `MegatronConfig` that have the shape of a config.json.

    Raises:
        ConfigError: the shape cannot be served.
    """
    told = Settings(values)
    told.common()
    base, share = told.rotary(0.25)
    kinds, moe = told.kinds("full_attention_interval"), _experts(told)
    told.done()
    return {
        "vocab_size": told.get("vocab_size"),
        "hidden_size": told.get("hidden_size"),
        "layers": len(kinds),
        "pattern": kinds,
        "rule": "gdn",
        "linear_heads": told.get("linear_num_key_heads"),
        "linear_value_heads": told.get("linear_num_value_heads"),
        "linear_key_dim": told.get("linear_key_head_dim"),
        "linear_value_dim": told.get("linear_value_head_dim"),
        "least_gate": None,
        "conv_width": told.get("linear_conv_kernel_dim"),
        "attention": "gqa",
        "heads": told.get("num_attention_heads"),
        "kv_heads": told.get("num_key_value_heads"),
        "head_dim": told.get("head_dim"),
        "rope_theta": base,
        "rotary_percent": share,
        "intermediate_size": told.get("intermediate_size"),
        "moe": moe,
        "overrides": NEUTRAL
        | {
            "attention_output_gate": True,
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "layernorm_epsilon": told.get("rms_norm_eps"),
            "moe_shared_expert_gate": moe is not None,
        },
    }


def _experts(told: Settings) -> dict[str, Any] | None:
    layers, alone = told.get("num_hidden_layers"), sorted(told.values.get("mlp_only_layers") or [])
    if not told.get("num_experts") or len(alone) == layers:
        return None
    told.only("decoder_sparse_step", 1)
    told.only("norm_topk_prob", True)
    if alone != list(range(len(alone))):
        told.faults.append(f"mlp_only_layers is {alone}, served are the first layers")
    top_k, shared = told.get("num_experts_per_tok"), told.get("shared_expert_intermediate_size")
    if top_k == 1:
        told.faults.append("one expert a token is served without its weight being normalised")
    if shared < 1:
        told.faults.append(f"shared_expert_intermediate_size is {shared}, served is 1 or more")
    return {
        "experts": told.get("num_experts"),
        "top_k": top_k,
        "intermediate_size": told.get("moe_intermediate_size"),
        "shared_intermediate_size": shared,
        "scoring": "softmax",
        "dense_layers": len(alone),
    }


def _rules_of(config: MegatronConfig) -> list[Rule]:
    """All tensors of a model."""
    found = outer_rules(config, "model.embed_tokens.weight")
    for index, kind in enumerate(config.kinds):
        found += layer_rules(config, index) + expert_rules(config, index, "shared_expert")
        found += {"K": _linear, "A": _full}[kind](config, index)
        if config.moe is not None and index >= config.moe.dense_layers:
            mine, theirs = f"decoder.layers.{index}.mlp.", f"model.layers.{index}.mlp."
            gate = f"{mine}shared_experts.gate_weight"
            found.append(copied(gate, f"{theirs}shared_expert_gate.weight", 1, config.hidden_size))
    return found


def _linear(config: MegatronConfig, index: int) -> list[Rule]:
    """The checkpoint's input projections are by key head already, its convolution is not."""
    mine, theirs = f"decoder.layers.{index}.self_attention.", f"model.layers.{index}.linear_attn."
    hidden, heads, value_heads = config.hidden_size, config.linear_heads, config.linear_value_heads
    keys, values = heads * config.linear_key_dim, value_heads * config.linear_value_dim
    parts = {
        f"{theirs}in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        f"{theirs}in_proj_ba.weight": (2 * value_heads, hidden),
    }
    taps = {f"{theirs}conv1d.weight": (2 * keys + values, 1, config.conv_width)}
    return [
        Rule(f"{mine}in_proj.weight", parts, lambda *each: by_head(heads, *each)),
        Rule(f"{mine}conv", taps, lambda all_: by_head(heads, *all_[:, 0].split([keys, keys, values]))),
        copied(f"{mine}a_log", f"{theirs}A_log", value_heads),
        copied(f"{mine}dt_bias", f"{theirs}dt_bias", value_heads),
        copied(f"{mine}norm", f"{theirs}norm.weight", config.linear_value_dim),
        copied(f"{mine}out_proj.weight", f"{theirs}out_proj.weight", hidden, values),
    ]


def _full(config: MegatronConfig, index: int) -> list[Rule]:
    """The checkpoint has query and gate of each head in turn, Megatron a group's queries, its gates, key and value."""
    mine, theirs = f"decoder.layers.{index}.self_attention.", f"model.layers.{index}.self_attn."
    hidden, (heads, groups), (dim, _) = config.hidden_size, config.full_heads, config.full_head_dims
    parts = {f"{theirs}q_proj.weight": (heads * 2 * dim, hidden)}
    parts |= {f"{theirs}{name}_proj.weight": (groups * dim, hidden) for name in ("k", "v")}

    def grouped(both: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, gate = both.reshape(heads, 2, dim, hidden).unbind(1)
        return by_head(groups, query.flatten(0, 1), gate.flatten(0, 1), key, value)

    return [
        Rule(f"{mine}linear_qkv.weight", parts, grouped),
        copied(f"{mine}q_layernorm.weight", f"{theirs}q_norm.weight", dim),
        copied(f"{mine}k_layernorm.weight", f"{theirs}k_norm.weight", dim),
        copied(f"{mine}linear_proj.weight", f"{theirs}o_proj.weight", hidden, heads * dim),
    ]


def _filed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' model under the names of files, experts apart."""
    return one_by_one(tensors)


def _beyond(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of names in files that are of the prediction of further tokens."""
    return ("mtp.",)


QWEN3_NEXT = Family(_fields_of, _rules_of, _filed, _beyond)
