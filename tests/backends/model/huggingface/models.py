"""A tiny model of each family, as the backend runs it and as transformers has it."""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.24")

from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.huggingface.config import HuggingFaceConfig
from harts.backends.model.huggingface.family import family_named

CHUNK, VOCABULARY, EXPERTS, TOP_K = 4, 24, 8, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # so that gates, scores and routers are far from the constants they start at
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
DENSE = {"intermediate_size": 48}
SIGMOID = {
    "intermediate_size": 48,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
SOFTMAX = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": COMMON | LATENT | SIGMOID | {"head_dim": 8, "n_group": 2, "topk_group": 1},
    "kimi_linear": COMMON | LATENT | SIGMOID | {"linear_head_dim": 8, "linear_num_heads": 4},
    "qwen3_next": COMMON | GROUPED | GATED_DELTA | DENSE | SOFTMAX,
    "qwen3_5": COMMON | GROUPED | GATED_DELTA | DENSE,
    "qwen3_5_moe": COMMON | GROUPED | GATED_DELTA | SOFTMAX,
    "olmo_hybrid": COMMON | GATED_DELTA | DENSE | {"num_key_value_heads": 2},
}
FAMILIES = sorted(OVERRIDES)
WITH_EXPERTS = ("bailing_hybrid", "kimi_linear", "qwen3_5_moe", "qwen3_next")
WITH_SHARED_GATE = ("qwen3_5_moe", "qwen3_next")
WITH_POSITIONS = ("bailing_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families that rotate queries and keys; the others know order from linear attention alone."""


def config(family: str, changes: dict[str, Any] | None = None, **fields: Any) -> HuggingFaceConfig:
    """Of a tiny model; `changes` are of its transformers configuration."""
    if fields.get("dtype") == "float64":
        fields.setdefault("experts", "eager")
    return HuggingFaceConfig(family=family, overrides=OVERRIDES[family] | (changes or {}), **fields)


def wrapped(settings: HuggingFaceConfig) -> HuggingFace:
    """The backend's model over the two oracles."""
    return _installed(settings)


def handed_over(module: Any, **fields: Any) -> HuggingFace:
    """The backend's model of a module of the caller's, over the two oracles."""
    return _installed(HuggingFaceConfig(**fields), module)


def _installed(settings: HuggingFaceConfig, module: Any = None) -> HuggingFace:
    """Whether or not it can serve."""
    model = HuggingFace(settings, Naive(Naive.Config()), Sdpa(Sdpa.Config()), module=module)
    model.install()
    return model


def tiny(family: str, changes: dict[str, Any] | None = None, **fields: Any) -> HuggingFace:
    """A tiny model of the backend whose norms, biases and selection biases are not what they start at."""
    model = wrapped(config(family, changes, **fields))
    scramble(model.module)
    return model


def scramble(module: nn.Module) -> None:
    """Move every vector and every selection bias: a term that starts at 0 or 1 hides whether it is used."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, each in sorted(module.state_dict().items()):
            if each.dim() == 1:
                each.add_(0.1 * torch.randn(each.shape, generator=draw).to(each))
            assert each.isfinite().all(), name


def stock(model: HuggingFace, attention: str = "eager") -> Any:
    """The same model as transformers runs it, with the same weights: its own attention, convolution and delta rule.

    Where FLA is installed, transformers calls its kernels; here it is the functions in torch that they replace. Chunks
    are shorter than their 64 to save time.
    """
    family = model.family
    chosen = {"experts_implementation": model.config.experts} if family.router else {}
    made = family.model_class._from_config(model.settings, dtype=model.config.torch_dtype, **chosen)
    made.set_attn_implementation(attention)
    if model.config.dtype == "float64":
        made.double()
    made.load_state_dict(model.module.state_dict())
    rule, conv = (inspect.unwrap(getattr(family.modeling, name)) for name in (family.delta_rule, family.conv))
    own = {family.delta_rule: partial(rule, chunk_size=CHUNK), family.conv: conv}
    for layer in made.modules():
        if type(layer).__name__ == family.linear_layer:
            layer.forward = MethodType(_with(type(layer).forward, own), layer)
    return made.train()


def _with(function: Any, names: dict[str, Any]) -> FunctionType:
    bare = inspect.unwrap(function)
    return FunctionType(bare.__code__, bare.__globals__ | names, bare.__name__, bare.__defaults__, bare.__closure__)


def routers(module: Any, family: str) -> list[Any]:
    """Of every layer with experts, in order."""
    router = family_named(family).router
    return [part for part in module.modules() if router is not None and type(part).__name__ == router.cls]
