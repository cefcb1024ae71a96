"""Linear attention (KDA and GDN) of compact rows as `self_attention` of a Megatron layer.

Heads are split over tensor-parallel ranks, and inside the layer over context-parallel ones. Weights are ordered by key
head, so a rank's part is that of its heads: row-wise slices of the whole. Shape suffixes: R compact rows, H and HV key
and value heads of this rank, K and V their channels, D channels of the convolution, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from harts.backends.base import Rule
from harts.backends.linear.conv import short_conv
from harts.backends.model.megatron.call import plan_of
from harts.backends.model.megatron.ulysses import to_heads, to_rows
from harts.backends.model.norm import l2norm, widen
from harts.backends.plan_tensors import PlanTensors

WIDE = ("conv", "a_log", "dt_bias")
"""Parameters that stay in float32 when the model is cast to a narrower dtype."""


@dataclass(frozen=True)
class LinearShape:
    """Of the linear-attention layers, as `ReferenceConfig` has it; heads of all ranks."""

    rule: Rule
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    least_gate: float | None
    full_decay: bool
    """Of kda: `in_proj` gives decays, and no low rank does; of gdn it does in any case."""


@dataclass
class LinearSubmodules:
    """Classes of the projections, split by their outputs and by their inputs."""

    column: Any
    row: Any


class TreeLinearAttention(MegatronModule):  # type: ignore[misc]  # megatron has no types
    """Projections, short convolution and norm are computed once a compact row; only the rule is replayed."""

    def __init__(
        self,
        config: Any,
        submodules: LinearSubmodules,
        layer_number: int,
        shape: LinearShape,
        pg_collection: Any,
        **others: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.shape = layer_number, shape
        self.tp, self.cp = pg_collection.tp, pg_collection.cp
        ranks = self.tp.size() * self.cp.size()
        self.heads, self.value_heads = shape.heads // ranks, shape.value_heads // ranks
        values = shape.value_heads // shape.heads
        self.conv_sizes = [shape.key_dim, shape.key_dim, values * shape.value_dim]
        decay = {"gdn": values, "kda": values * shape.key_dim if shape.full_decay else 0}[shape.rule]
        self.sizes = [sum(self.conv_sizes), values * shape.value_dim, values, decay]
        self.in_proj = self._column(submodules, config.hidden_size, shape.heads * sum(self.sizes))
        if not decay:
            self.decay_down = self._column(submodules, config.hidden_size, shape.key_dim)
            self.decay_up = self._column(submodules, shape.key_dim, shape.value_heads * shape.key_dim)
        self.out_proj = build_module(
            submodules.row,
            shape.value_heads * shape.value_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp,
        )
        self.norm = nn.Parameter(torch.ones(shape.value_dim, dtype=config.params_dtype))
        self.conv = self._split(shape.heads * sum(self.conv_sizes), shape.conv_width)
        self.a_log = self._split(shape.value_heads)
        self.dt_bias = self._split(shape.value_heads * (shape.key_dim if shape.rule == "kda" else 1))

    def _column(self, submodules: LinearSubmodules, inputs: int, outputs: int) -> Any:
        return build_module(
            submodules.column,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
            is_expert=False,
            tp_group=self.tp,
        )

    def _split(self, rows: int, *columns: int) -> nn.Parameter:
        """A parameter of all heads, split over tensor-parallel ranks."""
        device = self.norm.device if self.config.use_cpu_initialization else torch.cuda.current_device()
        part = nn.Parameter(torch.empty(rows // self.tp.size(), *columns, device=device))
        set_tensor_model_parallel_attributes(part, True, 0, 1)
        return part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as any module, but keep `WIDE` in float32 or wider, with no digit lost in between."""
        kept = {name: getattr(self, name).data for name in WIDE}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            parameter = getattr(self, name)
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.data = value.to(device=parameter.device, dtype=wide)
        return self

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **others: Any
    ) -> tuple[Tensor, None]:
        """Mix.

        Args:
            hidden_states: [rows of this rank, 1, hidden]: a part of R under sequence parallelism, else R.
            attention_mask: of Megatron's own attention.
            packed_seq_params: the carrier of the plan.
            others: what Megatron's own attention needs.

        Returns:
            As `hidden_states`, and no bias.

        Raises:
            BackendError: there is no plan.
        """
        call = plan_of(packed_seq_params, self.layer_number, "linear")
        projected, _ = self.in_proj(hidden_states)
        qkv, gate, beta, decay = torch.split(self._by_head(projected), self.sizes, dim=2)
        rows = len(qkv)
        step = decay if self.sizes[-1] else self._by_head(self._low_rank_step(hidden_states))
        inputs = self._convolved(qkv.reshape(rows, -1), call.plan) | {
            "g": self._log_decay(step.reshape(rows, -1)),
            "beta": widen(beta.reshape(rows, -1)).sigmoid(),
        }
        mixed = self._normed(call.linear.mix(inputs, call.plan)).to(gate.dtype)
        gate = gate.reshape(rows, self.value_heads, -1)
        gated = mixed * (gate.sigmoid() if self.shape.rule == "kda" else silu(gate))
        by_head = to_rows(gated.reshape(rows, self.heads, -1), self.cp)
        out, _ = self.out_proj(by_head.reshape(len(by_head), 1, -1))
        return out, None

    def _by_head(self, projected: Tensor) -> Tensor:
        """[rows inside a layer, 1, channels] to [R, H, channels of a key head]."""
        return to_heads(projected.reshape(len(projected), self.heads * self.cp.size(), -1), self.cp)

    def _own(self, parameter: Tensor) -> Tensor:
        """A parameter's rows of the heads that this rank has inside the layer."""
        own: Tensor = parameter.chunk(self.cp.size())[self.cp.rank()]
        return own

    def _convolved(self, qkv: Tensor, plan: PlanTensors) -> dict[str, Tensor]:
        """[R, D] to q, k [R, H, K] and v [R, HV, V]."""
        rows = len(qkv)
        by_head = short_conv(qkv, self._own(self.conv), plan).reshape(rows, self.heads, -1)
        q, k, v = torch.split(by_head, self.conv_sizes, dim=2)
        return {
            "q": l2norm(q.contiguous()),
            "k": l2norm(k.contiguous()),
            "v": v.reshape(rows, self.value_heads, -1).contiguous(),
        }

    def _low_rank_step(self, hidden_states: Tensor) -> Tensor:
        """Decay logits of kda, [rows inside a layer, 1, channels]."""
        latent, _ = self.decay_down(hidden_states)
        latent = gather_from_tensor_model_parallel_region(latent, group=self.tp)
        if self.config.sequence_parallel:
            latent = scatter_to_sequence_parallel_region(latent, group=self.tp)
        step: Tensor
        step, _ = self.decay_up(latent)
        return step

    def _log_decay(self, step: Tensor) -> Tensor:
        """Log decays, [R, HV, K] for kda, [R, HV] for gdn; see `ReferenceConfig.least_gate`."""
        step, rate = widen(step) + self._own(self.dt_bias), self._own(self.a_log).exp()
        if self.shape.rule == "kda":
            step, rate = step.reshape(len(step), self.value_heads, -1), rate[:, None]
        if self.shape.least_gate is None:
            return -rate * softplus(step)
        return self.shape.least_gate * torch.sigmoid(rate * step)

    def _normed(self, mixed: Tensor) -> Tensor:
        """Norm of each head, in float32 or wider; all ranks have its weight, each a part of its gradient."""
        weight = widen(copy_to_tensor_model_parallel_region(self.norm, group=self.tp))
        return rms_norm(widen(mixed), weight.shape, weight, self.config.layernorm_epsilon)
