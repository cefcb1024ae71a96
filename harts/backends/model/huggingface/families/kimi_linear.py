"""Kimi Linear: KDA and MLA without positions, experts with sigmoid scores."""

from harts.backends.model.huggingface.family import Family, Router, kimi_delta_shapes

FAMILY = Family(
    module="kimi_linear",
    config="KimiLinearConfig",
    model="KimiLinearForCausalLM",
    model_types=("kimi_linear",),
    full_layer="KimiLinearAttention",
    linear_layer="KimiLinearDeltaAttention",
    rule="kda",
    delta_rule="chunk_kimi_delta_attention",
    shapes=kimi_delta_shapes,
    router=Router("KimiLinearTopkRouter", "sigmoid", "e_score_correction_bias"),
)
