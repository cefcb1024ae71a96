"""In bfloat16 on a GPU, a Megatron model on compact rows is as close to float32 as the same model on flat ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.megatron.backend import MegatronModel
from harts.backends.plan_tensors import build_plan_tensors
from harts.registry import resolve
from tests.backends.model.megatron.runs import config, gradients, planned_loss, scrambled
from tests.forests import Spec, paths_of
from tests.parity.trees import Paths, layout_of

pytestmark = pytest.mark.gpu

CHUNK = 64
FOREST: Spec = [
    *[(-1, 500), (0, 130), (0, 30), (1, 40), (1, 1), (2, 300), (2, 20), (2, 2)],
    *[(-1, 77), (8, 1), (8, 64), (-1, 192), (11, 64), (11, 1)],
]
"""Two trees that fork inside chunks and one that forks on a boundary; one-token branches."""
LARGE = {"hidden_size": 256, "intermediate_size": 512, "linear_key_dim": 128, "linear_value_dim": 128, "init_std": 0.05}
MLA = {"attention": "mla", "heads": 4, "kv_rank": 64, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
GQA = {"attention": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 128}
MOE = {"experts": 8, "top_k": 2, "intermediate_size": 128, "dense_layers": 1}

LING = {
    **LARGE,
    **MLA,
    "rule": "kda",
    "linear_value_heads": 2,
    "decay": "full",
    "least_gate": -5.0,
    "head_gate": True,
    "moe": {**MOE, "experts": 16, "top_k": 4, "shared_intermediate_size": 128, "scoring": "sigmoid"},
    "overrides": {
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
}
QWEN3_NEXT = {
    **LARGE,
    **GQA,
    "rule": "gdn",
    "rotary_percent": 0.25,
    "moe": {**MOE, "dense_layers": 0, "shared_intermediate_size": 128},
    "overrides": {
        "attention_output_gate": True,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "moe_shared_expert_gate": True,
    },
}
SAFE = {"type": "kda", "safe_gate": True}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kda-mla": ({**LARGE, **MLA, "rule": "kda", "linear_value_heads": 2}, {"type": "kda"}),
    "gdn-gqa": ({**LARGE, **GQA, "rule": "gdn"}, {"type": "gdn"}),
    "kda-mla-experts": ({**LARGE, **MLA, "rule": "kda", "linear_value_heads": 2, "moe": MOE}, {"type": "kda"}),
    "ling": (LING, SAFE),
    "ling-kept": ({**LING, "recompute": "none"}, SAFE),
    "qwen3-next": (QWEN3_NEXT, {"type": "gdn"}),
}
"""Configuration, linear attention."""


def _model(changes: dict[str, Any], linear: Any, full: Any, device: str, dtype: str) -> MegatronModel:
    made = config(**({"recompute": "full"} | changes), dtype=dtype)
    return scrambled(MegatronModel(made, linear, full, device))


def _run(model: MegatronModel, paths: Paths, call_plan: str) -> tuple[float, dict[str, Tensor]]:
    layout = layout_of(paths, CHUNK, call_plan)
    loss = planned_loss(model, layout, paths, build_plan_tensors(layout, model.device, torch.float32))
    return float(loss.detach()), {name: each.float() for name, each in gradients(model.module, loss).items()}


def _apart(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients as one vector."""
    apart = torch.stack([(got[name] - each).norm() for name, each in wanted.items()]).norm()
    return float(apart / torch.stack([each.norm() for each in wanted.values()]).norm())


def check(changes: dict[str, Any], linear: Any, full: Any, device: str) -> None:
    paths = paths_of(FOREST)
    model = _model(changes, linear, full, device, "bfloat16")
    need = model.need(CHUNK)
    assert not [*linear.why_not(need), *full.why_not(need)]
    oracle = _model(changes, Naive(Naive.Config()), Sdpa(Sdpa.Config()), device, "float32")
    oracle.module.load_state_dict(model.module.state_dict())
    exact_loss, exact = _run(oracle, paths, "flat")
    (compact_loss, compact), (flat_loss, flat) = (_run(model, paths, plan) for plan in ("min_call", "flat"))
    assert all(each.isfinite().all() for each in compact.values())
    apart = _apart(compact, exact), _apart(flat, exact)
    told = f"losses {compact_loss}, {flat_loss}, exact {exact_loss}; gradients apart, compact and flat: {apart}"
    assert apart[1] < 0.2, told
    assert apart[0] <= 1.5 * apart[1] + 1e-3, told


@pytest.mark.parametrize("case", CASES)
def test_compact_is_as_close_to_float32_as_flat(case: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("fla")
    pytest.importorskip("flash_attn.cute.interface")
    changes, options = CASES[case]
    linear, full = resolve("linear_attention", options["type"]), resolve("full_attention", "tree")
    settings = {name: value for name, value in options.items() if name != "type"}
    check(changes, linear(linear.Config(**settings)), full(full.Config()), "cuda")
