"""Build a model of Megatron-core, and run it on the compact rows of a microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harts.backends.base import FullAttention, LinearAttention, ModelOutput
from harts.backends.model.megatron.call import TreeParams, report, tree_params
from harts.backends.model.megatron.checkpoints.convert import load
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.layer import TreeGpt
from harts.backends.model.megatron.options import transformer_config
from harts.backends.model.megatron.processes import one_process
from harts.backends.model.megatron.spec import block_spec
from harts.backends.plan_tensors import PlanTensors
from harts.errors import BackendError

KINDS = {"K": "linear", "A": "full"}


def built(config: MegatronConfig, device: str) -> Any:
    """The model, with the weights of its checkpoint, or random ones that its seed alone decides.

    Raises:
        ConfigError: an override cannot be had, or a checkpoint is not that of the model.
        BackendError: there is no GPU, or there are several processes.
    """
    options = transformer_config(config)
    one_process(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        made = TreeGpt(
            options,
            block_spec(config),
            vocab_size=config.vocab_size,
            max_sequence_length=0,  # of learned positions, which there are none
            position_embedding_type="rope",
            rotary_base=config.rope_theta,
            rotary_percent=config.rotary_percent,
            share_embeddings_and_output_weights=False,
        )
    if config.checkpoint is not None:
        load(made, config)
    return made.to(device)


def run(module: Any, plan: PlanTensors, linear: LinearAttention, full: FullAttention, kinds: str) -> ModelOutput:
    """Hidden states of every compact row, each computed once, and the routers' statistics.

    Args:
        module: the model.
        plan: the microbatch.
        linear: backend of the K layers.
        full: backend of the A layers.
        kinds: letter of each layer.

    Raises:
        BackendError: a layer did not run on the plan.
    """
    call = tree_params(plan, linear, full)
    hidden: Tensor = module(plan.input_ids[None], plan.position_ids[None], None, packed_seq_params=call)
    _check_layers(module, call, kinds)
    if not call.statistics:
        return ModelOutput(hidden, None, None, None)
    hidden, z, balance = report(hidden, call)
    load = torch.stack([call.statistics[layer].load for layer in sorted(call.statistics)])
    return ModelOutput(hidden, z, balance, load)


def routers_of(module: Any) -> dict[int, Any]:
    """Router of each layer with experts, by the layer's number, in order."""
    return {each.layer_number: each.mlp.router for each in module.decoder.layers if hasattr(each.mlp, "router")}


def _check_layers(module: Any, call: TreeParams, kinds: str) -> None:
    wanted = {number: KINDS[letter] for number, letter in enumerate(kinds, start=1)}
    missing = [f"{number} ({kind})" for number, kind in wanted.items() if call.ran.get(number) != kind]
    missing += [f"{number} (experts)" for number in routers_of(module) if number not in call.statistics]
    if missing:
        raise BackendError(f"model: these layers did not run on compact rows: {', '.join(missing)}")
