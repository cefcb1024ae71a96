"""Which classes the layers of a hybrid model are built from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.core_attention import TreeCoreAttention
from harts.backends.model.megatron.experts import GroupedExperts
from harts.backends.model.megatron.gate import GatedMla
from harts.backends.model.megatron.layer import TreeAttention, TreeLayer, TreeMla
from harts.backends.model.megatron.linear_attention import LinearShape, LinearSubmodules, TreeLinearAttention
from harts.backends.model.megatron.norm import RmsNorm
from harts.backends.model.megatron.router import TreeRouter


def block_spec(config: MegatronConfig, here: range) -> TransformerBlockSubmodules:
    """Some layers of a model, in order."""
    layers = [layer_spec(**mixing(config, config.kinds[index]), **feeding(config, index)) for index in here]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def layer_spec(**parts: Any) -> ModuleSpec:
    """A layer of some parts: what `mixing` gives, what `feeding` gives, or both."""
    return ModuleSpec(module=TreeLayer, submodules=TransformerLayerSubmodules(**parts))


def mixing(config: MegatronConfig, kind: str) -> dict[str, Any]:
    """Parts of a K or A layer that mix rows."""
    attention = {"K": linear_attention, "A": full_attention}[kind](config)
    return {"input_layernorm": RmsNorm, "self_attention": attention, "self_attn_bda": get_bias_dropout_add}


def feeding(config: MegatronConfig, index: int) -> dict[str, Any]:
    """Parts of the layer at a place that work on each row alone: dense, or experts."""
    mlp = _experts(config) if has_experts(config, index) else _dense()
    return {"pre_mlp_layernorm": RmsNorm, "mlp": mlp, "mlp_bda": get_bias_dropout_add}


def has_experts(config: MegatronConfig, index: int) -> bool:
    """Whether the layer at a place has experts."""
    return config.moe is not None and index >= config.moe.dense_layers


def linear_attention(config: MegatronConfig) -> ModuleSpec:
    """`self_attention` of a K layer."""
    shape = LinearShape(
        rule=config.rule,
        heads=config.linear_heads,
        value_heads=config.linear_value_heads,
        key_dim=config.linear_key_dim,
        value_dim=config.linear_value_dim,
        conv_width=config.conv_width,
        least_gate=config.least_gate,
        full_decay=config.decay == "full",
    )
    submodules = LinearSubmodules(column=ColumnParallelLinear, row=RowParallelLinear)
    return ModuleSpec(module=TreeLinearAttention, params={"shape": shape}, submodules=submodules)


def full_attention(config: MegatronConfig) -> ModuleSpec:
    """`self_attention` of an A layer: Megatron's own around `TreeCoreAttention`."""
    causal = {"attn_mask_type": AttnMaskType.causal}
    if config.attention == "mla":
        latent = MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=TreeCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RmsNorm,
            kv_layernorm=RmsNorm,
        )
        return ModuleSpec(module=GatedMla if config.head_gate else TreeMla, params=causal, submodules=latent)
    norm = RmsNorm if config.overrides.get("qk_layernorm") else IdentityOp
    grouped = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=TreeCoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(module=TreeAttention, params=causal, submodules=grouped)


def _dense() -> Any:
    return get_gpt_layer_local_spec().submodules.mlp


def _experts(config: MegatronConfig) -> Any:
    """Megatron's own layer of experts, with other parts. From 0.17 on it is a partial instead of a spec."""
    parts = {"router": TreeRouter, "experts": GroupedExperts}
    assert config.moe is not None
    stock = get_gpt_layer_local_spec(num_experts=config.moe.experts, moe_grouped_gemm=False).submodules.mlp
    if isinstance(stock, ModuleSpec):
        return replace(stock, submodules=replace(stock.submodules, **parts))
    given = stock.keywords | {"submodules": replace(stock.keywords["submodules"], **parts)}
    return partial(stock.func, *stock.args, **given)
