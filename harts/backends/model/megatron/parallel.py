"""How a Megatron model is split over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from harts.schema import StageConfig

if TYPE_CHECKING:
    from harts.backends.model.megatron.config import MegatronConfig


class ParallelConfig(StageConfig):
    """Sizes of Megatron's process groups; what is left of the processes is data-parallel replicas."""

    tensor: PositiveInt = 1
    """Processes that share every layer's heads, hidden units and vocabulary."""
    sequence: bool = True
    """Whether these also share the rows between the layers."""
    context: PositiveInt = 1
    """Processes that share the rows, and in attention the heads (Ulysses)."""
    pipeline: PositiveInt = 1
    """Stages of consecutive layers, run one microbatch forward, one backward."""
    expert: PositiveInt = 1
    """Processes that share the routed experts; they are among those that tensor, context and data parallelism have."""
    distributed_optimizer: bool = False
    """Whether replicas share the optimizer's state."""

    @property
    def model_size(self) -> int:
        """Processes of one replica."""
        return self.tensor * self.context * self.pipeline

    @property
    def heads_split(self) -> int:
        """Processes that share the heads of an attention layer."""
        return self.tensor * self.context

    @property
    def row_multiple(self) -> int:
        """Rows of a layout have to be a multiple of it."""
        return self.context * (self.tensor if self.sequence else 1)


def parallel_faults(config: MegatronConfig, processes: int) -> list[str]:
    """Why a model cannot be split so, an entry each.

    Args:
        config: of the model.
        processes: all there are.
    """
    parallel = config.parallel
    faults = []
    if processes % parallel.model_size:
        sizes = f"tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline}"
        text = f"which does not divide the {processes} processes that there are; torchrun starts more"
        faults.append(f"{sizes} is {parallel.model_size}, {text}")
    elif (processes // parallel.pipeline) % parallel.expert:
        faults.append(f"expert is {parallel.expert}, no divisor of the {processes // parallel.pipeline} of a stage")
    faults += [
        f"{name} is {count}, no multiple of tensor {parallel.tensor} x context {parallel.context}"
        for name, count in _heads(config).items()
        if count % parallel.heads_split
    ]
    if config.layers % parallel.pipeline and not _uneven(config):
        faults.append(f"layers is {config.layers}, no multiple of pipeline {parallel.pipeline}")
    faults += _split_sizes(config)
    if parallel.tensor > 1 and not parallel.sequence:
        faults += _without_sequence(config)
    return [f"parallel: {fault}" for fault in faults]


def _heads(config: MegatronConfig) -> dict[str, int]:
    found = {}
    if "K" in config.kinds:
        found["linear_heads"] = config.linear_heads
    if "A" in config.kinds:
        found["heads"] = config.heads
        if config.attention == "gqa" and config.kv_heads is not None:
            found["kv_heads"] = config.kv_heads
    return found


def _uneven(config: MegatronConfig) -> bool:
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    return any(config.overrides.get(name) for name in names)


def _split_sizes(config: MegatronConfig) -> list[str]:
    """What has to be a multiple of `tensor` or `expert` beside heads."""
    tensor, expert = config.parallel.tensor, config.parallel.expert
    wanted = {"intermediate_size": (config.intermediate_size, "tensor", tensor)}
    if config.moe is None:
        faults = [f"expert is {expert}, but the model has no experts"] if expert > 1 else []
    else:
        faults = []
        wanted["moe.experts"] = (config.moe.experts, "expert", expert)
        wanted["moe.shared_intermediate_size"] = (config.moe.shared_intermediate_size, "tensor", tensor)
    if "A" in config.kinds and config.attention == "mla":
        latent = (config.kv_rank or 0) + (config.rope_dim or 0)
        wanted["kv_rank + rope_dim"] = (latent, "tensor", tensor)
        wanted["q_rank"] = (config.q_rank or 0, "tensor", tensor)
    if "K" in config.kinds and config.rule == "kda":
        wanted["linear_key_dim"] = (config.linear_key_dim, "tensor", tensor)
    return faults + [
        f"{name} is {size}, no multiple of {kind} {split}"
        for name, (size, kind, split) in wanted.items()
        if size % split
    ]


def _without_sequence(config: MegatronConfig) -> list[str]:
    faults = []
    if config.moe is not None:
        faults.append("sequence is false: experts beside tensor parallelism need it, or rows are routed several times")
    if "A" in config.kinds and config.attention == "mla":
        faults.append("sequence is false: mla beside tensor parallelism needs it: gradients of shared keys are lost")
    return faults
