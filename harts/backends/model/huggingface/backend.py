"""The model backend `huggingface`: a hybrid model of transformers, unmodified, on compact rows."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harts.backends.base import FullAttention, LinearAttention, Model, ModelOutput, Need
from harts.backends.model.huggingface.call import ARGUMENT, CONVOLUTION, TreeCall
from harts.backends.model.huggingface.config import HuggingFaceConfig
from harts.backends.model.huggingface.family import Family, family_named, family_of
from harts.backends.model.huggingface.hooks import count_last, empty, install
from harts.backends.model.huggingface.parts import layers_with_experts, routers_of
from harts.backends.model.huggingface.recompute import check_graphs, check_training, enable
from harts.backends.model.huggingface.recompute import faults as recompute_faults
from harts.backends.model.huggingface.refusals import dropout_faults, few, head_faults, raise_faults, refusals
from harts.backends.model.huggingface.wide import precision
from harts.backends.model.moe import RouterStatistics, check_load, move_bias
from harts.backends.model.tokens import check_tokens
from harts.backends.plan_tensors import PlanTensors
from harts.errors import BackendError, ConfigError

MAKES = ("path", "family", "overrides", "dtype", "experts", "seed")
"""Fields of the configuration that tell what HARTS makes if no model is handed over."""


class HuggingFace(Model):
    """Any registered family of transformers, from a checkpoint or with random weights."""

    Config = HuggingFaceConfig
    config: HuggingFaceConfig

    takes_module = True

    def __init__(
        self,
        config: HuggingFaceConfig,
        linear: LinearAttention,
        full: FullAttention,
        device: str = "cpu",
        module: Any = None,
    ) -> None:
        super().__init__(config)
        self.device, self.linear, self.full = device, linear, full
        self.module: Any = _built(config, device) if module is None else checked(module, config, device)
        self.settings = self.module.config
        self.family = family_of(self.settings.model_type)
        if module is None:
            self.module.train()

    def install(self) -> None:
        """Hooks on the module's layers, and the checkpointing that is asked for."""
        install(self.module, self.family)
        if self.config.recompute == "full":
            enable(self.module)

    def need(self, chunk_size: int) -> Need:
        """What this model asks of the attention backends."""
        return _need(self.family, self.settings, self.module.dtype, chunk_size, self.device)

    @classmethod
    def waits_for_module(cls, config: HuggingFaceConfig) -> bool:
        """Without a path and a family."""
        return config.path is None and config.family is None

    @classmethod
    def need_of(cls, config: HuggingFaceConfig, chunk_size: int, device: str) -> Need | None:
        """`need` of a model that has not been built; None of the caller's own."""
        if cls.waits_for_module(config):
            return None
        family, settings = described(config)
        return _need(family, settings, config.torch_dtype, chunk_size, device)

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this model cannot run on compact rows."""
        found = refusals(self.module, self.family)
        if self.config.expert_bias_rate and (self.family.router is None or self.family.router.bias is None):
            found.append(f"expert_bias_rate is {self.config.expert_bias_rate}; its routers have no selection bias")
        return found

    def forward(self, plan: PlanTensors) -> ModelOutput:
        """Hidden states of every compact row, each computed once.

        Raises:
            InputError: a token id is not in the vocabulary.
            BackendError: a layer did not run on the plan, or would not be recomputed though `recompute` is full, or
                gradients of router losses would be lost, or something drops since the model was loaded.
        """
        if self.config.recompute == "full":
            check_training(self.module)
        raise_faults(dropout_faults(self.module))
        check_tokens(plan, self.settings.vocab_size)
        call = TreeCall(plan, self.linear, self.full)
        hidden, counted = self._run(call)
        self._check_layers(call.ran, set(counted))
        check_graphs(counted, self.module, self.family)
        if not counted:
            return ModelOutput(hidden, None, None, None)
        found = [counted[layer] for layer in sorted(counted)]
        z, balance, load = (torch.stack(each) for each in zip(*found, strict=True))
        return ModelOutput(hidden, z.sum(), balance.sum(), load)

    def _run(self, call: TreeCall) -> tuple[Tensor, dict[int, RouterStatistics]]:
        """Hidden states, and statistics of each layer with experts; a pass that fails leaves nothing behind either."""
        plan = call.plan
        count_last(self.module, self.family)
        try:
            with precision(self.module.dtype):
                output = self.module.model(
                    input_ids=plan.input_ids[None],
                    position_ids=plan.position_ids[None],
                    attention_mask=dict.fromkeys(self.settings.layer_types),  # none for any kind, and none is made
                    use_cache=False,
                    **{ARGUMENT: call},
                )
        finally:
            counted = call.end()
            empty(self.module, self.family)
        return output.last_hidden_state.squeeze(0), counted

    def _check_layers(self, ran: set[tuple[int, str]], counted: set[int]) -> None:
        attention = set(enumerate(self.settings.layer_types))
        wanted = attention | {(layer, CONVOLUTION) for layer, kind in attention if kind == "linear_attention"}
        missing = [f"{layer} ({part})" for layer, part in sorted(wanted - ran)]
        missing += [
            f"{each} (experts)" for each in layers_with_experts(self.module, self.family) if each not in counted
        ]
        if missing:
            raise BackendError(f"model: these layers did not run on compact rows: {', '.join(missing)}")

    def head_weight(self) -> Tensor:
        """LM head, [vocabulary, hidden].

        Raises:
            BackendError: the head has become more than its weight.
        """
        head = self.module.get_output_embeddings()
        raise_faults(head_faults(head))
        weight: Tensor = head.weight
        return weight

    def update_expert_bias(self, expert_load: Tensor) -> None:
        """Move the selection bias of each expert against its load: bias += rate * sign(mean load - load).

        Args:
            expert_load: q_c-weighted assignments over the whole step, [MoE layers, E].

        Raises:
            BackendError: the shape is not that of this model's experts.
        """
        routers = [router for _, router in routers_of(self.module, self.family)]
        check_load(expert_load, len(routers), routers[0].num_experts if routers else 0)
        name = None if self.family.router is None else self.family.router.bias
        if name is None or not self.config.expert_bias_rate:
            return
        for router, load in zip(routers, expert_load, strict=True):
            move_bias(getattr(router, name), load, self.config.expert_bias_rate)


def checked(module: Any, config: HuggingFaceConfig, device: str) -> Any:
    """The caller's own model.

    Raises:
        BackendError: the configuration asks for another one, or it is not of a registered family, or somewhere else.
    """
    given = config.model_dump(exclude_unset=True)
    others = [name for name in MAKES if given.get(name) not in (None, {})]
    faults = [f"a model is handed over, and {', '.join(others)} would make another one"] if others else []
    kind = getattr(getattr(module, "config", None), "model_type", None)
    family = family_of(str(kind))
    if not isinstance(module, family.model_class):
        faults.append(f"the model handed over is a {type(module).__name__}, needed is a {family.model}")
    else:
        if module.device.type != torch.device(device).type:
            faults.append(f"the model handed over is on {module.device}, the pipeline's device is {device}")
        faults += recompute_faults(module, family, config.recompute)
    if faults:
        raise BackendError("\n".join(f"models: HuggingFace: {fault}" for fault in faults))
    return module


def described(config: HuggingFaceConfig) -> tuple[Family, Any]:
    """The family, and the configuration of the text model.

    Raises:
        ConfigError: there is no such checkpoint, no such family, or an override that its configuration does not have.
    """
    if config.path is None:
        if config.family is None:
            raise ConfigError("model: give path, family, or hand a model to harts.load(..., module=model)")
        family = family_named(config.family)
        known = set(family.config_class().to_dict()) | set(getattr(family.config_class, "attribute_map", {}))
        unknown = sorted(set(config.overrides) - known)
        if unknown:
            raise ConfigError(f"model: overrides: {family.config} has no {', '.join(unknown)}")
        try:
            return family, family.config_class(**config.overrides)
        except (TypeError, ValueError, import_module("huggingface_hub.errors").StrictDataclassError) as error:
            raise ConfigError(f"model: overrides: {family.config}: {' '.join(str(error).split())}") from error
    file = Path(config.path) / "config.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: path: {file} cannot be read: {error}") from error
    family = family_of(str(read.get("model_type")))
    found = family.config_class.from_pretrained(config.path)
    return family, found


def _built(config: HuggingFaceConfig, device: str) -> Any:
    family, settings = described(config)
    cls = family.model_class
    chosen: dict[str, Any] = {"dtype": config.torch_dtype}
    if family.router is not None:
        chosen["experts_implementation"] = config.experts
    if config.path is not None:
        made, report = cls.from_pretrained(config.path, config=settings, output_loading_info=True, **chosen)
        absent = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
        if absent:
            raise ConfigError(f"model: path: {config.path} lacks {len(absent)} of the model's weights: {few(absent)}")
        made.to(device)
    else:
        cuda = [torch.device(device)] if torch.device(device).type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), torch.device(device):
            torch.manual_seed(config.seed)
            made = cls._from_config(settings, **chosen)
    return made.double() if config.dtype == "float64" else made


def _need(family: Family, settings: Any, dtype: torch.dtype, chunk_size: int, device: str) -> Need:
    return Need(
        device=device, dtype=dtype, rule=family.rule, chunk_size=chunk_size, **family.shapes(settings)._asdict()
    )
