"""What a family of models has to tell, so that its layers can run on compact rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

from harts.backends.base import Rule
from harts.errors import ConfigError
from harts.registry import names, resolve

KIND = "huggingface_families"


class Shapes(NamedTuple):
    """Of one model, as `Need` has them."""

    linear_heads: tuple[int, int]
    linear_head_dims: tuple[int, int]
    conv_width: int
    full_heads: tuple[int, int]
    full_head_dims: tuple[int, int]
    least_gate: float = float("-inf")


@dataclass(frozen=True)
class Router:
    """The routers of a family with experts."""

    cls: str
    """Class of the module; it returns the logits first, and the chosen experts last."""
    scoring: Literal["softmax", "sigmoid"]
    """How its logits become scores."""
    bias: str | None = None
    """Its buffer of selection biases."""
    shared_gate: str | None = None
    """Name of the linear module beside it that gates the shared expert."""


@dataclass(frozen=True)
class Family:
    """Names are those of the module that defines the family's models in transformers; classes may have subclasses."""

    module: str
    """The module, under `transformers.models`."""
    config: str
    """Class of the configuration of the text model, in the module's sibling `configuration_*`."""
    model: str
    """Class of the causal language model."""
    model_types: tuple[str, ...]
    """`model_type` of its configurations."""
    full_layer: str
    """Class of the full-attention layers, which look their function up in `ALL_ATTENTION_FUNCTIONS`."""
    linear_layer: str
    """Class of the linear-attention layers, whose short convolution is `conv1d` with an `activation`."""
    rule: Rule
    delta_rule: str
    """Function of the module that a linear-attention layer calls for the chunked delta rule."""
    shapes: Callable[[Any], Shapes]
    """From a configuration."""
    conv: str = "causal_conv1d_fn"
    """Function of the module that a linear-attention layer calls for the short convolution."""
    router: Router | None = None

    @property
    def modeling(self) -> Any:
        """The module that defines the models."""
        return import_module(f"transformers.models.{self.module}.modeling_{self.module}")

    @property
    def config_class(self) -> Any:
        """Class of the text model's configuration."""
        configuration = import_module(f"transformers.models.{self.module}.configuration_{self.module}")
        return getattr(configuration, self.config)

    @property
    def model_class(self) -> Any:
        """Class of the causal language model."""
        return getattr(self.modeling, self.model)


def family_named(name: str) -> Family:
    """A registered family.

    Raises:
        ConfigError: there is none of that name, with the nearest ones.
    """
    found: Any = resolve(KIND, name)
    return cast(Family, found)


def family_of(model_type: str) -> Family:
    """The registered family of a configuration's `model_type`.

    Raises:
        ConfigError: no family has it.
    """
    families = [family_named(name) for name in sorted(names(KIND))]
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(kind for family in families for kind in family.model_types))
    raise ConfigError(f"model: no family has model_type {model_type!r}; registered are {known}")


def gated_delta_shapes(config: Any) -> Shapes:
    """Of configurations with the names of Qwen3-Next: GDN, and grouped query attention of one head dim."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shapes(
        linear_heads=(config.linear_num_key_heads, config.linear_num_value_heads),
        linear_head_dims=(config.linear_key_head_dim, config.linear_value_head_dim),
        conv_width=config.linear_conv_kernel_dim,
        full_heads=(config.num_attention_heads, config.num_key_value_heads),
        full_head_dims=(head_dim, head_dim),
    )


def kimi_delta_shapes(config: Any, least_gate: float = float("-inf")) -> Shapes:
    """Of configurations with the names of Kimi Linear: KDA, and MLA whose keys and values are one a query head."""
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return Shapes(
        linear_heads=(config.linear_num_heads, config.linear_num_heads),
        linear_head_dims=(config.linear_head_dim, config.linear_head_dim),
        conv_width=config.linear_conv_kernel_dim,
        full_heads=(config.num_attention_heads, config.num_attention_heads),
        full_head_dims=(key_dim, config.v_head_dim),
        least_gate=least_gate,
    )
