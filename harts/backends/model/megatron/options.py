"""Megatron's own configuration of a model, and what in it compact rows cannot have."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.core import package_info
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.norm import EPSILON
from harts.errors import ConfigError

ONE_OUTCOME = "a shared row has one outcome, trajectories would each draw their own"
GRAPH = "a graph keeps the plan of the microbatch that it was captured with"
BY_PARTS = "runs parts of a layer by themselves, where routers have no multiplicities"
LOAD = "what happens to a row depends on how many rows there are, which sharing changes"
SEEN = "what a row sees is the plan's matter alone"
UNUSED = "parts of this model do not look at it"
QUANTISED = "scales are of all rows together, so a shared row is not what it is in its trajectory"

REFUSED: dict[str, str] = {
    "hidden_dropout": ONE_OUTCOME,
    "attention_dropout": ONE_OUTCOME,
    "moe_input_jitter_eps": ONE_OUTCOME,
    "moe_router_force_load_balancing": ONE_OUTCOME,
    "moe_router_force_biased": ONE_OUTCOME,
    "enable_cuda_graph": GRAPH,
    "external_cuda_graph": GRAPH,
    "cuda_graph_impl": GRAPH,
    "overlap_moe_expert_parallel_comm": BY_PARTS,
    "delay_wgrad_compute": BY_PARTS,
    "moe_router_fusion": "fused router losses do not know multiplicities",
    "moe_expert_capacity_factor": LOAD,
    "moe_pad_expert_input_to_capacity": LOAD,
    "moe_router_padding_for_fp8": LOAD,
    "moe_router_padding_for_quantization": LOAD,
    "moe_enable_routing_replay": "recorded choices are in the order of other rows",
    "mtp_num_layers": "a row at a fork has several next tokens",
    "virtual_pipeline_model_parallel_size": "interleaved schedules are not served",
    "window_size": SEEN,
    "qk_clip": "backends of full attention do not tell their largest score",
    "log_max_attention_logit": "backends of full attention do not tell their largest score",
    "apply_rope_fusion": "fused kernels rotate by the place of a row in the batch",
    "fp8": QUANTISED,
    "fp4": QUANTISED,
    "experimental_attention_variant": "it replaces the attention of layers",
    "heterogeneous_block_specs": "it replaces the attention of layers",
    "use_mup": "log-probs are not scaled by it",
    "qk_l2_norm": UNUSED,
    "moe_mlp_glu_interleave_size": UNUSED,
    "moe_token_dropping": LOAD,
    "deallocate_pipeline_outputs": "outputs of stages are views",
    "fp32_residual_connection": "parts of this model give the parameters' dtype",
    "cache_mla_latents": "it is for inference",
}
"""Options that would change results silently, and why."""

ONLY: dict[str, tuple[tuple[str | int | None, ...], str]] = {
    "moe_router_load_balancing_type": (
        ("none", "aux_loss", "global_aux_loss"),
        "plans do not tell which rows are one trajectory's, nor do others balance by multiplicities",
    ),
    "softmax_type": (("vanilla",), "backends of full attention have no sink"),
    "rope_type": (("rope",), "others are not served"),
    "moe_router_dtype": ((None, "fp32"), "statistics are float32"),
    "gtp_weight_remat_size": ((1,), UNUSED),
    "expert_gtp_weight_remat_size": ((1,), UNUSED),
}
"""Options that have to have one of some values, and why."""

UNFIT: dict[str, str] = {
    "pipeline_model_parallel_layout": "HybridModel has its own stages",
    "mla_down_proj_fusion": "it replaces the attention of layers",
}
"""Options that HybridModel does not have or that it would take otherwise, and why."""

BY_LAYER = ("no_rope_freq", "cp_comm_type")
"""Options that may have an entry a layer."""

ELSEWHERE = ("embedding_init_method_std", "linear_conv_kernel_dim", "moe_layer_freq")
"""What fields of this configuration say, though Megatron's do not follow them."""
SELECTED = ("core_attn", "mla_up_proj")
"""What can be recomputed by itself."""
OFF = (None, False, 0, "none")
HYBRID_SINCE = (0, 19)
"""Version of megatron-core."""


def refusals(options: Any, block: str = "gpt") -> list[str]:
    """Why a configuration of Megatron cannot run on compact rows, an entry each.

    Args:
        options: a `TransformerConfig`.
        block: Megatron's model that the layers are in, as in `MegatronConfig`.
    """
    refused = REFUSED | (UNFIT if block == "hybrid" else {})
    found = [
        f"{name} is {getattr(options, name)}: {why}"
        for name, why in refused.items()
        if getattr(options, name, None) not in OFF
    ]
    for name, (allowed, why) in ONLY.items():
        value = getattr(options, name, allowed[0])
        if not set(value if isinstance(value, list) else [value]) <= set(allowed):
            found.append(f"{name} is {value}, served is {' or '.join(map(str, allowed))}: {why}")
    if block == "hybrid":
        found += [
            f"{name} is {getattr(options, name)}: HybridModel has two layers where it has an entry"
            for name in BY_LAYER
            if isinstance(getattr(options, name, None), list)
        ]
    if options.recompute_granularity == "selective":
        others = sorted(set(options.recompute_modules or ()) - set(SELECTED))
        if others:
            found.append(f"recompute_modules has {', '.join(others)}, served are {', '.join(SELECTED)}: {BY_PARTS}")
    return found


def transformer_config(config: MegatronConfig) -> Any:
    """Megatron's configuration of a model.

    Raises:
        ConfigError: an override is unknown, belongs to another field, is refused, or Megatron does not take it; or this
            version of Megatron has no such block.
    """
    if config.block == "hybrid" and package_info.VERSION[:2] < HYBRID_SINCE:
        since = ".".join(map(str, HYBRID_SINCE))
        found = f"megatron-core {package_info.__version__} is installed"
        raise ConfigError(f"model: block: hybrid is for megatron-core {since} and newer, {found}")
    cls = MLATransformerConfig if config.attention == "mla" else TransformerConfig
    own, known = _own(config), {each.name for each in fields(cls)}
    faults = [f"{cls.__name__} has no {name}" for name in sorted(set(config.overrides) - known)]
    faults += [
        f"{name} follows from this configuration's own fields"
        for name in sorted(set(config.overrides) & {*own, *ELSEWHERE})
        if name not in own or config.overrides[name] != own[name]
    ]
    if faults:
        raise ConfigError("\n".join(f"model: overrides: {fault}" for fault in faults))
    try:
        made = cls(**(_defaults() | own | config.overrides))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"model: overrides: {cls.__name__}: {' '.join(str(error).split())}") from error
    refused = refusals(made, config.block)
    if refused:
        raise ConfigError("\n".join(f"model: overrides: {reason}" for reason in refused))
    return made


def _defaults() -> dict[str, Any]:
    """What overrides may change: nothing random, nothing that needs extensions in CUDA."""
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": EPSILON,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "moe_router_dtype": "fp32",
    }


def _own(config: MegatronConfig) -> dict[str, Any]:
    """What follows from the fields of this configuration, and what compact rows need."""
    return {
        "num_layers": config.layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.heads,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "init_method_std": config.init_std,
        "params_dtype": config.torch_dtype,
        "bf16": config.dtype == "bfloat16",
        "use_cpu_initialization": True,
        "init_method": _untouched,  # weights are drawn once all are there
        "output_layer_init_method": _untouched,
        "moe_router_load_balancing_type": "none",  # losses come with the statistics
        **_attention(config),
        **_experts(config),
        **_recompute(config),
        **_parallel(config),
    }


def _untouched(weight: Tensor) -> Tensor:
    return weight


def _attention(config: MegatronConfig) -> dict[str, Any]:
    if config.attention == "gqa":
        return {"num_query_groups": config.kv_heads, "kv_channels": config.head_dim}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_rank,
        "kv_lora_rank": config.kv_rank,
        "qk_head_dim": config.nope_dim,
        "qk_pos_emb_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": config.rope_theta,
    }


def _experts(config: MegatronConfig) -> dict[str, Any]:
    if config.moe is None:
        return {}
    return {
        "num_moe_experts": config.moe.experts,
        "moe_router_topk": config.moe.top_k,
        "moe_ffn_hidden_size": config.moe.intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe.shared_intermediate_size or None,
        "moe_router_score_function": config.moe.scoring,
        "moe_router_pre_softmax": config.moe.scoring == "softmax" and config.moe.top_k == 1,
        "moe_router_bias_update_rate": config.moe.expert_bias_rate,
        **({"moe_router_enable_expert_bias": True} if config.moe.expert_bias_rate else {}),
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_grouped_gemm": False,
    }


def _recompute(config: MegatronConfig) -> dict[str, Any]:
    if config.recompute == "none":
        return {}
    layers = {"gpt": 1, "hybrid": 2}[config.block]
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": layers}


def _parallel(config: MegatronConfig) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.tensor > 1 and parallel.sequence,
        "context_parallel_size": parallel.context,
        "pipeline_model_parallel_size": parallel.pipeline,
        "pipeline_dtype": config.torch_dtype,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,  # gradients are summed over microbatches and replicas, not averaged
    }
