"""Ling 3: KDA with bounded gates and gated MLA, experts with sigmoid scores in groups."""

from typing import Any

from harts.backends.model.huggingface.family import Family, Router, Shapes, kimi_delta_shapes


def shapes(config: Any) -> Shapes:
    """Log decays are bounded if the configuration says so."""
    return kimi_delta_shapes(config, config.kda_lower_bound if config.kda_safe_gate else float("-inf"))


FAMILY = Family(
    module="bailing_hybrid",
    config="BailingHybridConfig",
    model="BailingHybridForCausalLM",
    model_types=("bailing_hybrid",),
    full_layer="BailingHybridAttention",
    linear_layer="BailingHybridDeltaAttention",
    rule="kda",
    delta_rule="chunk_kimi_delta_attention",
    shapes=shapes,
    router=Router("BailingHybridTopkRouter", "sigmoid", "e_score_correction_bias"),
)
