"""Qwen3.5 with experts, the text model: GDN and gated grouped query attention, softmax scores."""

from harts.backends.model.huggingface.family import Family, Router, gated_delta_shapes

FAMILY = Family(
    module="qwen3_5_moe",
    config="Qwen3_5MoeTextConfig",
    model="Qwen3_5MoeForCausalLM",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    full_layer="Qwen3_5MoeAttention",
    linear_layer="Qwen3_5MoeGatedDeltaNet",
    rule="gdn",
    delta_rule="torch_chunk_gated_delta_rule",
    shapes=gated_delta_shapes,
    router=Router("Qwen3_5MoeTopKRouter", "softmax", shared_gate="shared_expert_gate"),
)
