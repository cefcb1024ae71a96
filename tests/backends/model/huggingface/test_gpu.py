"""In bfloat16 on a GPU, a model on compact rows is as close to float32 as the same model trajectory by trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.base import FullAttention, LinearAttention
from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.huggingface.config import HuggingFaceConfig
from harts.backends.plan_tensors import build_plan_tensors
from harts.registry import resolve
from tests.backends.model.huggingface.models import GATED_DELTA, OVERRIDES, scramble
from tests.backends.model.huggingface.runs import compact, gradients
from tests.forests import Spec, paths_of
from tests.parity.trees import Paths, layout_of

pytestmark = pytest.mark.gpu

CHUNK = 64
FOREST: Spec = [
    *[(-1, 500), (0, 130), (0, 30), (1, 40), (1, 1), (2, 300), (2, 20), (2, 2)],
    *[(-1, 77), (8, 1), (8, 64), (-1, 192), (11, 64), (11, 1)],
]
"""Two trees that fork inside chunks and one that forks on a boundary; one-token branches."""
LARGE = {"hidden_size": 256, "num_attention_heads": 4, "initializer_range": 0.05}
MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128}
GQA = {"num_key_value_heads": 2, "head_dim": 128}
WIDE_DELTA = GATED_DELTA | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@dataclass(frozen=True)
class Case:
    """A family with the kernels that it runs on."""

    family: str
    changes: dict[str, Any]
    linear: str
    full: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of linear attention."""

    def __str__(self) -> str:
        return "-".join((self.family, self.linear, self.full))


CASES = [
    Case("bailing_hybrid", LARGE | MLA, "kda", "flash_attention_4", {"safe_gate": True}),
    Case("bailing_hybrid", LARGE | MLA, "kda", "tree", {"safe_gate": True}),
    Case("qwen3_5", LARGE | GQA | WIDE_DELTA, "gdn", "tree"),
]


def _backend(kind: str, name: str, **config: Any) -> Any:
    cls = resolve(kind, name)
    return cls(cls.Config(**config))


def _model(case: Case, linear: LinearAttention, full: FullAttention, device: str, **fields: Any) -> HuggingFace:
    settings = HuggingFaceConfig(family=case.family, overrides=OVERRIDES[case.family] | case.changes, **fields)
    made = HuggingFace(settings, linear, full, device)
    made.install()
    scramble(made.module)
    return made


def _run(model: HuggingFace, paths: Paths, call_plan: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of all trajectories, and gradients, in float32."""
    layout = layout_of(paths, CHUNK, call_plan)
    model.module.zero_grad()
    found = compact(model, layout, build_plan_tensors(layout, model.device, torch.float32))
    found.loss.backward()
    grads = {name: each.float() for name, each in gradients(model.module).items()}
    return torch.cat(found.logits).detach().float(), grads


def _apart(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients as one vector."""
    apart, size = (
        torch.stack([each.norm() for each in part]).norm()
        for part in ([got[name] - each for name, each in wanted.items()], wanted.values())
    )
    return float(apart / size)


def check(case: Case, linear: LinearAttention, full: FullAttention, device: str) -> None:
    paths = paths_of(FOREST)
    model = _model(case, linear, full, device, dtype="bfloat16", recompute="full")
    need = model.need(CHUNK)
    assert not [*model.why_not(need), *linear.why_not(need), *full.why_not(need)]
    oracle = _model(case, Naive(Naive.Config()), Sdpa(Sdpa.Config()), device, dtype="float32", experts="eager")
    oracle.module.load_state_dict(model.module.state_dict())
    exact_logits, exact = _run(oracle, paths, "flat")
    cosine, apart = {}, {}
    for plan in ("min_call", "flat"):
        logits, grads = _run(model, paths, plan)
        assert all(each.isfinite().all() for each in grads.values())
        cosine[plan] = float(torch.cosine_similarity(logits, exact_logits, dim=1).mean())
        apart[plan] = _apart(grads, exact)
    told = f"{case}: mean logit cosine {cosine}, gradients apart {apart}"
    assert cosine["flat"] > 0.99 and apart["flat"] < 0.2, told
    assert 1 - cosine["min_call"] <= 1.5 * (1 - cosine["flat"]) + 1e-5, told
    assert apart["min_call"] <= 1.5 * apart["flat"] + 1e-3, told


@pytest.fixture
def device() -> str:
    """A GPU with all kernels."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("fla")
    pytest.importorskip("flash_attn.cute.interface")
    return "cuda"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compact_is_as_close_to_float32_as_flat(case: Case, device: str) -> None:
    linear = _backend("linear_attention", case.linear, **case.settings)
    check(case, linear, _backend("full_attention", case.full), device)


def test_logits_have_the_bits_of_flat(device: str) -> None:
    """Where full attention packs branches as it packs trajectories, no kernel depends on what lies beside a row."""
    case = CASES[0]
    linear = _backend("linear_attention", case.linear, **case.settings)
    model = _model(case, linear, _backend("full_attention", case.full), device, dtype="bfloat16")
    compact_logits, flat_logits = (_run(model, paths_of(FOREST), plan)[0] for plan in ("min_call", "flat"))
    assert torch.equal(compact_logits, flat_logits)
