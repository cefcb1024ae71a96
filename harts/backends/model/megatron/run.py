"""Build a model of Megatron-core, and run it on the compact rows of a microbatch."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from harts.backends.base import FullAttention, LinearAttention, ModelOutput
from harts.backends.model.megatron.call import RowSplit, TreeParams, report, tree_params
from harts.backends.model.megatron.checkpoints.convert import load
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.initial import initialise
from harts.backends.model.megatron.layer import TreeGpt
from harts.backends.model.megatron.options import transformer_config
from harts.backends.model.megatron.output import all_rows
from harts.backends.model.megatron.parts import buffers_of, number_of, parts_of
from harts.backends.model.megatron.processes import Groups, join
from harts.backends.model.megatron.spec import block_spec
from harts.backends.plan_tensors import PlanTensors
from harts.errors import BackendError

KINDS = {"K": "linear", "A": "full"}


class Built(NamedTuple):
    """This process's part of a model."""

    module: Any
    groups: Groups
    rows: RowSplit


def built(config: MegatronConfig, device: str) -> Built:
    """The model, with the weights of its checkpoint, or random ones that its seed alone decides.

    Raises:
        ConfigError: an override cannot be had, the model cannot be split so, or a checkpoint is not that of the model.
        BackendError: there is no GPU, or there are other process groups.
    """
    groups = join(config, device)
    options = transformer_config(config)
    module = {"gpt": _gpt, "hybrid": _hybrid}[config.block](
        config,
        options,
        vocab_size=-(-config.vocab_size // groups.tp.size()) * groups.tp.size(),
        max_sequence_length=0,  # of learned positions, which there are none
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=config.rotary_percent,
        share_embeddings_and_output_weights=False,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
    )
    parts = list(parts_of(module, config, groups))
    if config.checkpoint is None:
        initialise(parts, config)
    else:
        load(parts, buffers_of(module), config)
    piece = (groups.tp.rank(), groups.tp.size()) if options.sequence_parallel else (0, 1)
    return Built(module.to(device), groups, RowSplit(groups.cp.rank(), groups.cp.size(), *piece))


def _gpt(config: MegatronConfig, options: Any, **given: Any) -> Any:
    first = get_transformer_layer_offset(options)
    return TreeGpt(options, block_spec(config, range(first, first + get_num_layers_to_build(options))), **given)


def _hybrid(config: MegatronConfig, options: Any, **given: Any) -> Any:
    from harts.backends.model.megatron.hybrid import hybrid  # noqa: PLC0415  (older versions have no such model)

    return hybrid(config, options, **given)


def run(
    made: Built, plan: PlanTensors, linear: LinearAttention, full: FullAttention, config: MegatronConfig
) -> ModelOutput:
    """Hidden states of every compact row, each computed once, and this process's part of the routers' statistics.

    Args:
        made: the model.
        plan: the microbatch.
        linear: backend of the K layers.
        full: backend of the A layers.
        config: of the model.

    Returns:
        On all but the last pipeline stage hidden states are what the next one takes.

    Raises:
        BackendError: a layer did not run on the plan, or the rows cannot be split.
    """
    if not made.module.pre_process and made.module.decoder.input_tensor is None:
        raise BackendError("model: this pipeline stage has no input; whole steps run over stages (run_step)")
    call = tree_params(plan, linear, full, made.rows)
    hidden: Tensor = made.module(call.input_ids[None], call.position_ids[None], None, packed_seq_params=call)
    made.module.decoder.input_tensor = None  # of this microbatch alone
    _check_layers(made.module, call, config.kinds)
    if made.module.post_process:
        hidden = all_rows(hidden, made.groups, made.rows)
    if config.moe is None:
        return ModelOutput(hidden, None, None, None)
    hidden, z, balance = report(hidden, call)
    return ModelOutput(hidden, z, balance, _load(made.module, call, config))


def _load(module: Any, call: TreeParams, config: MegatronConfig) -> Tensor:
    """This process's part of every layer's load, [MoE layers, E]."""
    assert config.moe is not None
    first, q = config.moe.dense_layers, call.plan.multiplicity
    load = q.new_zeros(config.layers - first, config.moe.experts)
    for number, found in call.statistics.items():
        load[number_of(module, number) - 1 - first] = found.load
    return load


def routers_of(module: Any) -> dict[int, Any]:
    """Router of each layer with experts, by the layer's number in the configuration, in order."""
    found = [each for each in module.decoder.layers if hasattr(each.mlp, "router")]
    return {number_of(module, each.layer_number): each.mlp.router for each in found}


def _check_layers(module: Any, call: TreeParams, kinds: str) -> None:
    here = sorted({number_of(module, each.layer_number) for each in module.decoder.layers})
    ran = {number_of(module, number): kind for number, kind in call.ran.items()}
    routed = {number_of(module, number) for number in call.statistics}
    wanted = {number: KINDS[kinds[number - 1]] for number in here}
    missing = [f"{number} ({kind})" for number, kind in wanted.items() if ran.get(number) != kind]
    missing += [f"{number} (experts)" for number in routers_of(module) if number not in routed]
    if missing:
        raise BackendError(f"model: these layers did not run on compact rows: {', '.join(missing)}")
