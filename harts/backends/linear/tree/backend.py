"""The two ways to execute a plan that the GPU backends share: all rounds at once, or one packed call a round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need, RoundOutput
from harts.backends.devices import has_cuda
from harts.backends.linear.checks import check_call, check_rows
from harts.backends.linear.rounds import check_inputs
from harts.backends.linear.tree.executions import CallExecution, call_execution, fused_schedule
from harts.backends.linear.tree.grid import CHUNK, Inputs
from harts.backends.linear.tree.launch import Launcher, configs_for, faults_of
from harts.backends.linear.tree.machine import interpreted
from harts.backends.linear.tree.operator import tree_delta_rule
from harts.backends.linear.tree.rule import Rule
from harts.backends.linear.tree.schedule import MAX_CHUNKS
from harts.backends.plan_tensors import PackedCall, PlanTensors
from harts.errors import ConfigError
from harts.schema import StageConfig

GPU_DTYPES = (torch.bfloat16, torch.float16)
"""Tiles of float32 rows do not fit in shared memory."""
INTERPRETER_DTYPES = (torch.float16, torch.float32)
MAX_KEY_DIM = 256
MAX_ROW = 2**31 // (MAX_CHUNKS * CHUNK) - 1
"""Channels of a row over all heads: state kernels count the elements of a span in 32 bits."""


class TreeConfig(StageConfig):
    """Settings of the GPU backends."""

    execution: Literal["fused", "rounds"] = "fused"
    """`fused`: chunk work once for all rounds, and only the recurrence walks them. `rounds`: one packed call a round,
    as any backend serves it; the same kernels and the same bits."""
    keep_states: bool = True
    """Keep the state before every chunk for the backward pass, in the dtype of the rows: K * V / 64 + V values a row
    and value head between the passes; with recomputation of activations they live in the backward pass of one layer
    alone. Otherwise the recurrence is walked again, which is slower."""
    kernel_configs: str | None = None
    """File of kernel configurations that `harts tune` has written; none: those shipped for the GPU."""


class TreeBackend(LinearAttention):
    """A delta rule in chunks of 64 tokens; states are float32, products in the dtype of q, k and v.

    Beside the contract, q, k and v have one dtype of at most 32 bits.
    """

    Config = TreeConfig
    config: TreeConfig
    bitwise: ClassVar[bool] = True
    gate_dims: ClassVar[int]
    """Dimensions of g."""
    kernels: ClassVar[tuple[Any, ...]]
    """Kernels whose configuration is pinned."""
    launchers: Callable[[tuple[int, int]], Launcher] | None = None
    """Makes the launcher for head dims (K, V) in place of that of the pinned configurations: for checks, which watch
    every launch, and for tuning, which varies them."""

    @abstractmethod
    def _chunks(self, launcher: Launcher) -> Rule:
        """The chunk-parallel work."""

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        (heads, value_heads), (key_dim, value_dim) = need.linear_heads, need.linear_head_dims
        found = self._machine_faults(need)
        if need.rule not in self.rules:
            found.append(f"it computes {' or '.join(self.rules)}, the model's rule is {need.rule}")
        dtypes = GPU_DTYPES if torch.device(need.device).type == "cuda" else INTERPRETER_DTYPES
        if need.dtype not in dtypes:
            found.append(f"the dtype {need.dtype} is not one of {', '.join(map(str, dtypes))} on {need.device}")
        if need.chunk_size != CHUNK:
            found.append(f"its chunks are {CHUNK} tokens, the plan's are {need.chunk_size}")
        if heads < 1 or value_heads < 1 or value_heads % heads:
            found.append(f"{value_heads} value heads are not a multiple of {heads} query heads")
        if not 1 <= key_dim <= MAX_KEY_DIM:
            found.append(f"a key dim of {key_dim} is not between 1 and {MAX_KEY_DIM}")
        if value_dim < 1:
            found.append(f"a value dim of {value_dim} is not positive")
        if value_heads * max(key_dim, value_dim) > MAX_ROW:
            found.append(f"{value_heads} value heads of {max(key_dim, value_dim)} channels are more than {MAX_ROW}")
        if key_dim % 2 or value_dim % 2:
            found.append(f"the head dims ({key_dim}, {value_dim}) are not even, as the kernels need for 16-bit types")
        return found

    def _machine_faults(self, need: Need) -> list[str]:
        device = torch.device(need.device)
        if device.type != "cuda" and not interpreted():
            return [f"its kernels need a CUDA device, the pipeline runs on {need.device}"]
        if device.type == "cuda" and not has_cuda(need.device):
            return [f"its kernels need a CUDA device, torch finds no {need.device}"]
        if self.launchers is not None:
            return []
        try:
            configs = configs_for(device, self.config.kernel_configs)
        except ConfigError as error:
            return [str(error)]
        return [f"kernel_configs: {fault}" for fault in faults_of(configs, [each.__name__ for each in self.kernels])]

    def mix(self, inputs: dict[str, Tensor], plan: PlanTensors) -> Tensor:
        """Linear attention over the compact rows of one microbatch; see `LinearAttention.mix`."""
        if self.config.execution == "rounds":
            return super().mix(inputs, plan)
        check_inputs(self, inputs, plan)
        check_rows(inputs)
        x = self._inputs(inputs, plan.chunk_size)
        rule = self._rule_of(x)
        device = x.v.device
        schedule = plan.once(("tree", device), lambda: fused_schedule(plan, device))
        return tree_delta_rule(rule, schedule, x, _no_states(x), keep_states=self.config.keep_states)[0]

    def call(self, rows: dict[str, Tensor], packed: PackedCall, initial_state: Tensor) -> RoundOutput:
        """Run N independent sequences; see `LinearAttention.call`.

        Raises:
            ValueError: the call breaks the contract (shapes, an empty sequence, a state inside a chunk).
        """
        check_call(rows, packed, initial_state)
        x = self._inputs(rows, packed.chunk_size)
        device = x.v.device
        execution: CallExecution = packed.once(("tree", device), lambda: call_execution(packed, device))
        given = initial_state.to(torch.float32).contiguous()
        output, bank = tree_delta_rule(
            self._rule_of(x), execution.schedule, x, given, keep_states=self.config.keep_states
        )
        return RoundOutput(output, bank.index_select(0, execution.slot_of_state))

    def _inputs(self, inputs: dict[str, Tensor], chunk_size: int) -> Inputs:
        x = Inputs(*(inputs[name].contiguous() for name in Inputs._fields))
        if chunk_size != CHUNK:
            raise ValueError(f"chunk_size: is {chunk_size}, the kernels' is {CHUNK}")
        if x.g.dim() != self.gate_dims:
            raise ValueError(f"g: has shape {tuple(x.g.shape)}, {self.rules[0]} takes {self.gate_dims} dimensions")
        dtypes = {x.q.dtype, x.k.dtype, x.v.dtype}
        if len(dtypes) > 1 or not dtypes <= {*GPU_DTYPES, *INTERPRETER_DTYPES}:
            raise ValueError(
                f"q, k, v: are {x.q.dtype}, {x.k.dtype}, {x.v.dtype}; one dtype of at most 32 bits is needed"
            )
        return x

    def _rule_of(self, x: Inputs) -> Rule:
        head_dims = x.k.shape[-1], x.v.shape[-1]
        if self.launchers is not None:
            return self._chunks(self.launchers(head_dims))
        return self._chunks(Launcher(configs_for(x.v.device, self.config.kernel_configs), head_dims))


def _no_states(x: Inputs) -> Tensor:
    return x.v.new_empty(0, x.v.shape[1], x.k.shape[2], x.v.shape[2], dtype=torch.float32)
