"""Ling 3, `bailing_hybrid` in transformers: KDA, latent attention with a gate a head, group-limited sigmoid routing.

Megatron rotates interleaved pairs of latent attention as the checkpoint does, so no channels change places.
"""

from __future__ import annotations

import re
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

RENAMED = (
    (r"^model\.embed_tokens\.", "model.word_embeddings."),
    (r"\.self_attn\.forget_gate\.", ".attention."),
    (r"\.self_attn\.o_proj\.", ".attention.dense."),
    (r"\.self_attn\.", ".attention."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.expert_bias"),
)
"""Names in transformers, and in files."""
LATENT_EPSILON = 1e-6
"""Of the norms of latents, whatever the configuration says."""


def _fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `MegatronConfig` that have the shape of a config.json.

    Raises:
        ConfigError: the shape cannot be served.
    """
    told = Settings(values)
    told.common()
    told.only("rms_norm_eps", LATENT_EPSILON)
    heads, head_dim = told.get("num_attention_heads"), told.get("linear_head_dim", "head_dim")
    told.only("num_key_value_heads", heads, None)
    told.only("linear_num_heads", heads)
    base, _ = told.rotary(1.0)
    kinds, moe, routing = told.kinds("layer_group_size"), *_experts(told)
    told.done()
    return {
        "vocab_size": told.get("vocab_size"),
        "hidden_size": told.get("hidden_size"),
        "layers": len(kinds),
        "pattern": kinds,
        "rule": "kda",
        "linear_heads": heads,
        "linear_value_heads": heads,
        "linear_key_dim": head_dim,
        "linear_value_dim": head_dim,
        "least_gate": told.get("kda_lower_bound") if told.get("kda_safe_gate") else None,
        "decay": "full",
        "conv_width": told.get("linear_conv_kernel_dim", "short_conv_kernel_size"),
        "attention": "mla",
        "heads": heads,
        "q_rank": told.get("q_lora_rank"),
        "kv_rank": told.get("kv_lora_rank"),
        "nope_dim": told.get("qk_nope_head_dim"),
        "rope_dim": told.get("qk_rope_head_dim"),
        "value_dim": told.get("v_head_dim"),
        "head_gate": True,
        "rope_theta": base,
        "intermediate_size": told.get("intermediate_size"),
        "moe": moe,
        "overrides": NEUTRAL | routing | {"qk_layernorm": True, "layernorm_epsilon": LATENT_EPSILON},
    }


def _experts(told: Settings) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """`moe`, and Megatron's options of the router."""
    layers, dense = told.get("num_hidden_layers"), told.get("first_k_dense_replace")
    kinds = told.values.get("mlp_layer_types") or ["dense" if index < dense else "sparse" for index in range(layers)]
    dense = kinds.index("sparse") if "sparse" in kinds else layers
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        told.faults.append(f"mlp_layer_types is {kinds}; served are dense layers, then sparse ones")
    if dense == layers:
        return None, {}
    told.only("moe_renormalize", True)
    told.only("norm_topk_prob", True)
    groups, chosen = told.get("num_expert_group", "n_group"), told.get("topk_group")
    top_k = told.get("num_experts_per_token", "num_experts_per_tok")
    shared = told.get("num_shared_experts", "n_shared_experts")
    if top_k == 1:
        told.faults.append("one expert a token is served without its weight being normalised")
    if shared < 1:
        told.faults.append(f"num_shared_experts is {shared}, served is 1 or more")
    routing = {
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": told.get("routed_scaling_factor"),
    }
    if chosen < groups:
        # groups are ranked by their best two experts, in Megatron by their best top_k / topk_group
        if top_k // chosen != 2:
            told.faults.append(f"{top_k} experts a token of {chosen} groups, served are two a group")
        routing |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    moe = {
        "experts": told.get("num_experts", "num_local_experts"),
        "top_k": top_k,
        "intermediate_size": told.get("moe_intermediate_size"),
        "shared_intermediate_size": shared * told.get("moe_intermediate_size"),
        "scoring": "sigmoid",
        "dense_layers": dense,
    }
    return moe, routing


def _rules_of(config: MegatronConfig) -> list[Rule]:
    """All tensors of a model."""
    found = outer_rules(config, "model.word_embeddings.weight")
    for index, kind in enumerate(config.kinds):
        found += layer_rules(config, index) + expert_rules(config, index, "shared_experts")
        found += {"K": _linear, "A": _full}[kind](config, index)
        if config.moe is not None and index >= config.moe.dense_layers:
            mine, theirs = f"decoder.layers.{index}.mlp.router.", f"model.layers.{index}.mlp.gate."
            found.append(copied(f"{mine}expert_bias", f"{theirs}expert_bias", config.moe.experts))
    return found


def _linear(config: MegatronConfig, index: int) -> list[Rule]:
    mine, theirs = f"decoder.layers.{index}.self_attention.", f"model.layers.{index}.attention."
    hidden, heads, dim = config.hidden_size, config.linear_heads, config.linear_key_dim
    parts = {f"{theirs}{name}_proj.weight": (heads * dim, hidden) for name in ("q", "k", "v", "g")}
    parts |= {f"{theirs}b_proj.weight": (heads, hidden), f"{theirs}f_proj.weight": (heads * dim, hidden)}
    taps = {f"{theirs}{name}_conv1d.weight": (heads * dim, 1, config.conv_width) for name in ("q", "k", "v")}
    return [
        Rule(f"{mine}in_proj.weight", parts, lambda *each: by_head(heads, *each)),
        Rule(f"{mine}conv", taps, lambda *each: by_head(heads, *(part[:, 0] for part in each))),
        copied(f"{mine}a_log", f"{theirs}A_log", heads),
        copied(f"{mine}dt_bias", f"{theirs}dt_bias", heads * dim),
        copied(f"{mine}norm", f"{theirs}o_norm.weight", dim),
        copied(f"{mine}out_proj.weight", f"{theirs}dense.weight", hidden, heads * dim),
    ]


def _full(config: MegatronConfig, index: int) -> list[Rule]:
    mine, theirs = f"decoder.layers.{index}.self_attention.", f"model.layers.{index}.attention."
    hidden, heads, latent = config.hidden_size, config.heads, config.kv_rank or 0
    (query_dim, value_dim), rotated = config.full_head_dims, config.rope_dim or 0
    if config.q_rank is None:
        queries = [copied(f"{mine}linear_q_proj.weight", f"{theirs}q_proj.weight", heads * query_dim, hidden)]
    else:
        queries = [
            copied(f"{mine}linear_q_down_proj.weight", f"{theirs}q_a_proj.weight", config.q_rank, hidden),
            copied(f"{mine}q_layernorm.weight", f"{theirs}q_a_layernorm.weight", config.q_rank),
            copied(f"{mine}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", heads * query_dim, config.q_rank),
        ]
    both = heads * (query_dim - rotated + value_dim)
    return [
        *queries,
        copied(f"{mine}linear_kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight", latent + rotated, hidden),
        copied(f"{mine}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight", latent),
        copied(f"{mine}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", both, latent),
        copied(f"{mine}linear_gate.weight", f"{theirs}g_proj.weight", heads, hidden),
        copied(f"{mine}linear_proj.weight", f"{theirs}dense.weight", hidden, heads * value_dim),
    ]


def _filed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' model under the names of files, convolutions and experts apart."""
    found: dict[str, Tensor] = {}
    for name, each in one_by_one(tensors).items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901
        if name.endswith(".attention.conv1d.weight"):
            prefix = name.removesuffix("conv1d.weight")
            found |= {f"{prefix}{part}_conv1d.weight": taps for part, taps in zip("qkv", each.chunk(3), strict=True)}
        else:
            found[name] = each
    return found


def _beyond(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of names in files that are of the prediction of further tokens."""
    layers, more = values["num_hidden_layers"], values.get("num_nextn_predict_layers", values.get("num_mtp_layers", 0))
    return tuple(f"model.layers.{index}." for index in range(layers, layers + more))


LING = Family(_fields_of, _rules_of, _filed, _beyond)
