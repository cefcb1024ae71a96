"""Reading the config.json of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harts.errors import ConfigError

NEUTRAL: dict[str, Any] = {
    "attention_output_gate": False,
    "qk_layernorm": False,
    "layernorm_zero_centered_gamma": False,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
}
"""Options of Megatron that are part of a shape, as a family has them that does not use them."""


class Settings:
    """Values by name, and what about them cannot be served."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.faults: list[str] = []

    def get(self, *names: str) -> Any:
        """The value that goes by one of several names.

        Raises:
            ConfigError: there is none.
        """
        for name in names:
            if name in self.values:
                return self.values[name]
        raise ConfigError(f"model: checkpoint: config.json has no {' or '.join(names)}")

    def only(self, name: str, *served: Any) -> None:
        """A value that has to be one of some; absent is the first."""
        value = self.values.get(name, served[0])
        if value not in served:
            self.faults.append(f"{name} is {value}, served is {' or '.join(map(str, served))}")

    def common(self) -> None:
        """What no family can have otherwise."""
        self.only("hidden_act", "silu")
        self.only("tie_word_embeddings", False)
        self.only("attention_bias", False)
        self.only("attention_dropout", 0.0)
        self.only("quantization_config", None)
        for name in sorted(self.values):
            if name.endswith("swiglu_limit_list") and any(self.values[name] or ()):
                self.faults.append(f"{name} is {self.values[name]}, experts are served without limits")

    def rotary(self, absent: float) -> tuple[float, float]:
        """Base of the rotary frequencies, and the share of a head's channels that are rotated, else `absent`."""
        told = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = told.get("rope_type", told.get("type", "default"))
        if kind != "default":
            self.faults.append(f"rope_type is {kind}, served is default")
        base = told.get("rope_theta")
        share = told.get("partial_rotary_factor", self.values.get("partial_rotary_factor", absent))
        return float(self.get("rope_theta") if base is None else base), float(share)

    def kinds(self, every: str) -> str:
        """Letters of the layers: K is linear attention, A full; without a list every n-th is A, `every` tells n."""
        layers, told = self.get("num_hidden_layers"), self.values.get("layer_types")
        if told is None:
            group = self.get(every)
            return "".join("KA"[(index + 1) % group == 0] for index in range(layers))
        letters = {"linear_attention": "K", "full_attention": "A"}
        self.faults += [f"layer_types has {each}" for each in sorted({*told} - {*letters})]
        if len(told) != layers:
            self.faults.append(f"layer_types has {len(told)} layers, num_hidden_layers is {layers}")
        return "".join(letters.get(each, "A") for each in told)

    def done(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: there is something; it names all of it.
        """
        if self.faults:
            raise ConfigError("\n".join(f"model: checkpoint: config.json: {fault}" for fault in self.faults))
