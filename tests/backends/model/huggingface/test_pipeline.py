"""A file that names a transformers model, from bundled rollouts to a trained step and its comparison with flat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.backends.model.huggingface.models import OVERRIDES, WITH_EXPERTS

Call = Callable[..., tuple[int, str, str]]
BUNDLED = Path(__file__).resolve().parents[4] / "pipelines" / "data" / "synthetic.jsonl.gz"


def _file(folder: Path, family: str, **model: object) -> Path:
    """A whole run on the first of the bundled rollouts."""
    overrides = OVERRIDES[family] | {"vocab_size": 4096, "initializer_range": 0.05}
    train: dict[str, object] = {
        "steps": 1,
        "learning_rate": 1e-3,
        "optimizer": "adamw",
        "objective": {"type": "grpo", "old_logprobs": "current"},
        "compare": "flat",
    }
    if family in WITH_EXPERTS:
        train |= {"router_z_coefficient": 1e-3, "router_balance_coefficient": 1e-2}
    text = {
        "pipeline": ["ingest", "partition", "schedule", "call_plan", "layout", "execute", "restore"],
        "ingest": {"type": "jsonl", "path": str(BUNDLED), "limit": 6, "group_advantage": "normalized"},
        "partition": {"type": "paper", "capacity": 2048, "replicas": 1},
        "schedule": {"type": "slots"},
        "call_plan": {"type": "min_call", "chunk_size": 64},
        "layout": {"type": "round_major", "conv_width": 4, "row_multiple": 64},
        "execute": {"type": "compact"},
        "restore": {"type": "mapped", "rows_per_block": 512, "entropy": True},
        "model": {"type": "huggingface", "family": family, "overrides": overrides} | model,
        "linear_attention": {"type": "naive"},
        "full_attention": {"type": "sdpa"},
        "device": "cpu",
        "train": train,
        "observe": {"verify": "on"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("bailing_hybrid", {"dtype": "float64", "experts": "eager", "recompute": "full", "expert_bias_rate": 1e-3}),
        ("olmo_hybrid", {"dtype": "float64", "experts": "eager"}),
        ("qwen3_5", {"dtype": "float32", "recompute": "full"}),
    ],
)
def test_a_run_trains_and_holds_against_flat(
    family: str, fields: dict[str, object], tmp_path: Path, call: Call
) -> None:
    code, out, err = call("run", _file(tmp_path, family, **fields), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["comparison"]["faults"] == []
    assert found["comparison"]["tolerance"] == (1e-10 if fields["dtype"] == "float64" else 1e-4)
    assert found["comparison"]["row_ratio"] > 1.2
    assert len(found["train"]) == 1
    assert all(each["gradient_norm"] > 0 for each in found["train"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.family=qwen3_nxt", "'qwen3_nxt' is not registered; did you mean qwen3_next?"),
        ("model.overrides.hiden_size=8", "Qwen3_5TextConfig has no hiden_size"),
        ("model.dtype=float64", "experts: grouped_mm has no float64; set experts: eager"),
        ("model.overrides.attention_dropout=0.1", "HuggingFace: attention_dropout is 0.1"),
        ("model.overrides.linear_conv_kernel_dim=3", "conv_width is 3, but the layout prepares windows of 4"),
        ("model.expert_bias_rate=0.1", "its routers have no selection bias"),
        ("model.overrides.linear_num_value_heads=3", "linear_attention: Naive: "),
    ],
)
def test_what_cannot_run_is_refused(change: str, message: str, tmp_path: Path, call: Call) -> None:
    code, _, err = call("check", _file(tmp_path, "qwen3_5"), "--set", change)
    assert code == 2
    assert message in err
