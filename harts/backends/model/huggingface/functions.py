"""What stands in for a model's own attention, convolution and delta rule when it runs on compact rows.

Shape suffixes: R compact rows, H and G query and key/value heads of full attention, D channels, W taps; H and HV query
and value heads of linear attention, K and V head dims. Models have a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from harts.backends.linear.conv import short_conv
from harts.backends.linear.dtypes import wide_dtype
from harts.backends.model.huggingface.call import CONVOLUTION, LayerCall
from harts.backends.model.norm import l2norm
from harts.errors import BackendError

ACTIVATIONS = ("silu", "swish")
"""Names of the one activation of the short convolution."""
CHANGES_SCORES = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of attention that no backend here knows."""


class AttentionFunctions:
    """Stands for transformers' table of attention functions."""

    @staticmethod
    def get_interface(_name: str, _default: Callable[..., Any]) -> Callable[..., Any]:
        """Attention on compact rows, whatever the model is configured for."""
        return tree_attention


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_call: LayerCall,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Full attention, in the form in which transformers asks for it.

    Args:
        module: the layer's attention.
        query: [1, H, R, Dk], rotated.
        key: [1, G, R, Dk], rotated.
        value: [1, G, R, Dv].
        attention_mask: none: the plan says what a row sees.
        tree_call: of this forward pass, in this layer.
        scaling: factor on the scores; none is Dk ** -0.5.
        dropout: 0.
        others: what other implementations need.

    Returns:
        [1, R, H, Dv], and no weights.

    Raises:
        BackendError: the layer asks for something that compact rows cannot give.
    """
    call, layer = tree_call
    wrong = [f"{name} {others[name]}" for name in CHANGES_SCORES if others.get(name) is not None]
    wrong += [f"dropout {dropout}"] if dropout else []
    wrong += ["an attention mask"] if attention_mask is not None else []
    if wrong:
        text = f"asks for {', '.join(wrong)}; on compact rows there is none"
        raise BackendError(f"layer {layer} ({type(module).__name__}): {text}")
    call.enter(layer, "full_attention")
    q, k, v = (each.squeeze(0).transpose(0, 1).contiguous() for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return call.full.attend(q, k, v, call.plan.views, scale)[None], None


def tree_conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    tree_call: LayerCall,
    **_others: Any,
) -> Tensor:
    """The short convolution, in the form in which transformers' layers ask for it.

    Args:
        hidden_states: [1, D, R].
        weight: taps, [D, W].
        bias: none.
        activation: SiLU.
        tree_call: of this forward pass, in this layer.

    Returns:
        [1, D, R].

    Raises:
        BackendError: the layer asks for another convolution.
    """
    call, layer = tree_call
    if wrong := conv_faults(bias, activation):
        raise BackendError(f"layer {layer}: its short convolution has {' and '.join(wrong)}")
    call.enter(layer, CONVOLUTION)
    rows = hidden_states.squeeze(0).transpose(0, 1)
    return short_conv(rows.contiguous(), weight, call.plan).transpose(0, 1)[None]


def conv_faults(bias: Tensor | None, activation: str | None) -> list[str]:
    """What a short convolution has that compact rows cannot give."""
    found = [] if bias is None else ["a bias"]
    return found if activation in ACTIVATIONS else [*found, f"activation {activation}, not silu"]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    tree_call: LayerCall,
    use_qk_l2norm_in_kernel: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """The delta rule over compact rows, in the form in which transformers' layers ask for it.

    Args:
        query: [1, R, H, K], not normalised if `use_qk_l2norm_in_kernel` says so.
        key: as `query`.
        value: [1, R, HV, V].
        g: log decays, [1, R, HV, K] or [1, R, HV].
        beta: [1, R, HV].
        tree_call: of this forward pass, in this layer.
        use_qk_l2norm_in_kernel: see `query`.
        initial_state: none; states stay in the backend.
        output_final_state: no.
        others: what other implementations need.

    Returns:
        [1, R, HV, V] in the dtype of value, and no state.

    Raises:
        BackendError: the layer has a cache.
    """
    call, layer = tree_call
    if initial_state is not None or output_final_state:
        raise BackendError(f"layer {layer}: has a cache of states; compact rows are trained without one")
    call.enter(layer, "linear_attention")
    q, k, v = (each.squeeze(0) for each in (query, key, value))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    wide = wide_dtype(v)
    inputs = {"q": q, "k": k, "v": v, "g": g.squeeze(0).to(wide), "beta": beta.squeeze(0).to(wide)}
    mixed = call.linear.mix({name: each.contiguous() for name, each in inputs.items()}, call.plan)
    return mixed[None].to(value.dtype), None
