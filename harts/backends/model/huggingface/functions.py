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
from harts.backends.model.huggingface.call import Current, TreeCall
from harts.backends.model.norm import l2norm
from harts.errors import BackendError

ACTIVATIONS = ("silu", "swish")
"""Names of the one activation of the short convolution."""
CHANGES_SCORES = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of attention that no backend here knows."""


class AttentionFunctions:
    """Stands for transformers' table of attention functions in the layers of one model."""

    def __init__(self, stock: Any, current: Current) -> None:
        self.stock, self.current = stock, current

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Attention on compact rows for a call with a plan, and what the model is configured for without one."""
        stock = self.stock.get_interface(name, default)

        def attention(module: Any, *given: Any, tree_call: TreeCall | None = None, **others: Any) -> Any:
            if tree_call is None:
                self.current.pop(module.layer_idx, None)
                return stock(module, *given, **others)
            return tree_attention(module, *given, tree_call=tree_call, **others)

        return attention


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_call: TreeCall,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Full attention, in the form in which transformers asks for it.

    Args:
        module: the layer's attention, which knows its `layer_idx`.
        query: [1, H, R, Dk], rotated.
        key: [1, G, R, Dk], rotated.
        value: [1, G, R, Dv].
        attention_mask: none: the plan says what a row sees.
        tree_call: of this forward pass.
        scaling: factor on the scores; none is Dk ** -0.5.
        dropout: 0.
        others: what other implementations need.

    Returns:
        [1, R, H, Dv], and no weights.

    Raises:
        BackendError: the layer asks for something that compact rows cannot give.
    """
    layer = f"layer {module.layer_idx} ({type(module).__name__})"
    wrong = [f"{name} {others[name]}" for name in CHANGES_SCORES if others.get(name) is not None]
    wrong += [f"dropout {dropout}"] if dropout else []
    wrong += ["an attention mask"] if attention_mask is not None else []
    if wrong:
        raise BackendError(f"{layer}: asks for {', '.join(wrong)}; on compact rows there is none")
    tree_call.enter(module.layer_idx, "full_attention")
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_call.full.attend(q, k, v, tree_call.plan.views, scale)[None], None


def tree_conv(layer: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The short convolution of a layer; `stock` without a plan."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        tree_call: TreeCall | None = None,
        **others: Any,
    ) -> Tensor:
        """[1, D, R] and taps [D, W] to [1, D, R]."""
        if tree_call is None:
            return stock(hidden_states, weight, bias, activation=activation, **others)
        if bias is not None or activation not in ACTIVATIONS:
            has = "a bias" if bias is not None else f"activation {activation}"
            raise BackendError(f"layer {layer}: its short convolution has {has}; served is silu without a bias")
        rows = hidden_states[0].transpose(0, 1)
        return short_conv(rows.contiguous(), weight, tree_call.plan).transpose(0, 1)[None]

    return causal_conv1d_fn


def tree_delta_rule(layer: int, stock: Callable[..., Any], current: Current) -> Callable[..., Any]:
    """The chunked delta rule of a layer; `stock` without a plan."""

    def chunked_delta_rule(*given: Tensor, tree_call: TreeCall | None = None, **others: Any) -> Any:
        if tree_call is None:
            current.pop(layer, None)
            return stock(*given, **others)
        return delta_rule(*given, layer=layer, tree_call=tree_call, **others)

    return chunked_delta_rule


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    layer: int,
    tree_call: TreeCall,
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
        layer: its index in the model.
        tree_call: of this forward pass.
        use_qk_l2norm_in_kernel: see `query`.
        initial_state: none; states stay in the backend.
        output_final_state: no.
        others: what other implementations need.

    Returns:
        [1, R, HV, V] in the dtype of value, and no state.

    Raises:
        BackendError: the layer has a cache.
    """
    if initial_state is not None or output_final_state:
        raise BackendError(f"layer {layer}: has a cache of states; compact rows are trained without one")
    tree_call.enter(layer, "linear_attention")
    q, k, v = query[0], key[0], value[0]
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    wide = wide_dtype(v)
    inputs = {"q": q, "k": k, "v": v, "g": g[0].to(wide), "beta": beta[0].to(wide)}
    mixed = tree_call.linear.mix({name: each.contiguous() for name, each in inputs.items()}, tree_call.plan)
    return mixed[None].to(value.dtype), None
