"""Transformer Engine's fused attention through cuDNN (extra `te`).

cuDNN runs graphs that are built for a shape. For packed sequences Transformer Engine builds one for each bucket of the
numbers of sequences, of query rows and of key rows; depending on the versions of both, the number of sequences itself
and the greatest lengths count instead. Those are rounded here, so that any pair of versions builds few graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from harts.backends.base import Need
from harts.backends.devices import capability
from harts.backends.full.packed import (
    Expanding,
    PackedViews,
    import_faults,
    machine_faults,
    packed_views,
)
from harts.backends.linear.sizes import ceil_div, power_of_two
from harts.backends.plan_tensors import AttentionViews
from harts.schema import StageConfig

MODULE = "transformer_engine.pytorch"
FEWEST_SEQUENCES = 32
SEQUENCE_STEP = 512
"""More sequences than this are rounded up to a multiple of it, fewer to a power of two."""
LEAST_LENGTH = 128
FUSED_ONLY = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""Makes Transformer Engine raise where it would choose another kernel, one that holds all scores among them."""


class TransformerEngineConfig(StageConfig):
    """Settings of Transformer Engine."""

    deterministic: bool = False
    """Sum gradients in a fixed order: equal bits in every run, slower. Not on compute capability 9.0, where the
    workspace that this takes grows with sequences times the greatest lengths."""


class TransformerEngine(Expanding):
    """`DotProductAttention` of packed sequences (THD) with `padding_causal_bottom_right`; MHA, GQA and MLA."""

    Config = TransformerEngineConfig
    config: TransformerEngineConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._modules: dict[tuple[int, int, int, int, float, bool], Any] = {}

    def _faults(self, need: Need) -> list[str]:
        found = machine_faults(need, (9, 0)) + import_faults(MODULE, "te")
        if any(dim % 8 for dim in need.full_head_dims):
            found.append(f"head dims {need.full_head_dims} (query/key, value) are not multiples of 8")
        asked = [
            *(["the config"] if self.config.deterministic else []),
            *(["torch.use_deterministic_algorithms"] if torch.are_deterministic_algorithms_enabled() else []),
        ]
        if asked and capability(need.device) == (9, 0):
            found.append(
                f"{' and '.join(asked)} asked for deterministic kernels, which on compute capability 9.0 serve only "
                "batches * heads * greatest lengths of queries and keys below 2**30"
            )
        return found

    def deterministic(self, need: Need) -> bool:
        """As the config or torch's own setting says."""
        return self.config.deterministic or torch.are_deterministic_algorithms_enabled()

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        packed = bucketed_views(views)
        chosen = torch.are_deterministic_algorithms_enabled()  # modules look at it when they are made
        attention = self._module(q.shape[1], k.shape[1], q.shape[2], v.shape[2], scale, chosen)
        with environment(FUSED_ONLY):
            out: Tensor = attention(
                q,
                k,
                v,
                cu_seqlens_q=packed.cu_q,
                cu_seqlens_kv=packed.cu_k,
                max_seqlen_q=packed.max_q,
                max_seqlen_kv=packed.max_k,
            )
        return out.view(len(q), q.shape[1], v.shape[2])

    def _module(self, *key: Any) -> Any:
        if key not in self._modules:
            heads, groups, key_dim, value_dim, scale, _ = key
            # it looks at this variable when it is made
            with environment({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if self.config.deterministic else "1"}):
                self._modules[key] = import_module(MODULE).DotProductAttention(
                    heads,
                    (key_dim, value_dim),
                    num_gqa_groups=groups,
                    qkv_format="thd",
                    attn_mask_type="padding_causal_bottom_right",
                    softmax_scale=scale,
                )
        return self._modules[key]


def bucketed_views(views: AttentionViews) -> PackedViews:
    """Packed branches in sizes that few graphs serve, made once for the views: empty sequences at the end."""
    return views.once("bucketed", lambda: _bucketed(packed_views(views)))


def _bucketed(packed: PackedViews) -> PackedViews:
    spare = sequence_bucket(len(packed.cu_q) - 1) + 1 - len(packed.cu_q)
    cu_q, cu_k = (torch.cat([each, each[-1:].expand(spare)]) for each in (packed.cu_q, packed.cu_k))
    return PackedViews(cu_q, cu_k, length_bucket(packed.max_q), length_bucket(packed.max_k))


def sequence_bucket(sequences: int) -> int:
    """Number of sequences that a call gets."""
    if sequences > SEQUENCE_STEP:
        return ceil_div(sequences, SEQUENCE_STEP) * SEQUENCE_STEP
    return max(FEWEST_SEQUENCES, power_of_two(sequences))


def length_bucket(length: int) -> int:
    """Greatest length that a call gets, at least the true one."""
    return max(LEAST_LENGTH, power_of_two(length))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
