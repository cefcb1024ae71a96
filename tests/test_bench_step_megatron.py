"""The benchmark of a training step with a model of Megatron: on the host, in one process and in two."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.scripts import TOOLS, script
from tests.test_bench_step import with_tiny_set

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'harts[megatron]'")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the host, and Megatron takes the GPU")

MODELS = TOOLS / "step_bench" / "models"
ORACLES = ["linear_attention={type: naive}", "full_attention={type: sdpa}"]
SIZES = {
    "vocab_size": 511,  # no multiple of tensor parallelism
    **dict.fromkeys(("linear_heads", "linear_value_heads", "heads"), 2),
    **dict.fromkeys(("linear_key_dim", "linear_value_dim", "kv_rank", "nope_dim", "value_dim"), 8),
    **{"rope_dim": 4, "hidden_size": 32, "intermediate_size": 64, "init_std": 0.1, "moe.experts": 16},
    **dict.fromkeys(("moe.intermediate_size", "moe.shared_intermediate_size"), 16),
}
SMALL = [*ORACLES, "device=cpu", "call_plan.chunk_size=16", *(f"model.{name}={size}" for name, size in SIZES.items())]
PARTS = [
    *("delta rule", "linear layers, rest", "attention", "attention layers, rest", "MoE and MLP", "norms"),
    *("LM head, log-probs", "layout tensors", "other"),
]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with script("bench_step") as module:
        yield module


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Whole small step, all of it compared."""
    shared = with_tiny_set(tmp_path_factory.mktemp("shared"))
    found = ["--model", "ling_megatron", "--dtype", "float32", "--layers", "4", "--capacity", "240", "--repeats", "1"]
    found += ["--workloads", "tiny", "--parity", "9", "--shared", str(shared), "--quiet", "--json"]
    return found + [word for each in SMALL for word in ("--set", each)]


@pytest.fixture(scope="module")
def alone(bench: ModuleType, arguments: list[str]) -> dict[str, Any]:
    """What one process tells."""
    command = [sys.executable, str(TOOLS / "bench_step.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return _result(done.stdout)


def _result(printed: str) -> dict[str, Any]:
    (found,) = json.loads(printed)["results"]
    return dict(found)


def _check(found: dict[str, Any]) -> None:
    assert found["parity"]["faults"] == []
    assert found["parity"]["differences"]["HARTS"]["gradient"] < 1e-5
    assert found["parity"]["off_cosine"]["HARTS"]["most"] < 1e-9
    assert found["memory_bytes"] == {}
    for parts in found["breakdown"]["seconds"].values():
        assert list(parts) == PARTS
        for name in PARTS[:6]:
            assert min(parts[name].values()) > 0  # forward, recomputation and backward
    for seconds in found["seconds"].values():
        assert 0 < seconds["forward"]["median"] + seconds["backward"]["median"] < seconds["total"]["median"]


def test_a_model_of_megatron_is_measured(alone):
    _check(alone)
    assert alone["cut"]["compression"] > 2
    assert alone["processes"] == 1
    assert alone["slot_imbalance"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["tp2+sp", "pp2", "ep2"])
def test_two_processes_compute_what_one_does(arguments, alone, topology):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(TOOLS / "bench_step.py"), *arguments, "--topology", topology]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = _result(done.stdout)  # of one process alone
    _check(found)
    assert found["processes"] == 2
    padding = 2 * SIZES["hidden_size"] if topology == "tp2+sp" else 0  # a row of no token, of embedding and LM head
    assert found["parameters"] == alone["parameters"] + padding
    assert found["parity"]["loss"] == pytest.approx(alone["parity"]["loss"], rel=1e-6)
    for side in ("HARTS", "flat"):
        assert found["gradient_norm"][side] == pytest.approx(alone["gradient_norm"][side], rel=1e-5)
        assert found["sides"][side]["microbatches"] % 2 == 0 or topology != "ep2"
    assert set(found["slot_imbalance"]) == ({"HARTS", "flat"} if topology == "ep2" else set())


def test_the_file_has_the_shape_of_the_one_of_transformers(bench, monkeypatch):
    pytest.importorskip("transformers")
    from harts.backends.model.huggingface.backend import described
    from harts.config import load_settings

    ours, theirs = (
        load_settings(MODELS / f"{name}.yaml", ORACLES).components["model"].config for name in ("ling_megatron", "ling")
    )
    family, settings = described(theirs)
    with torch.device("meta"):
        wanted = family.model_class._from_config(settings, dtype=torch.bfloat16)
    with importlib.import_module("step_bench.processes").surroundings(True):
        from harts.backends.model.megatron import run
        from harts.backends.model.megatron.checkpoints.convert import config_of
        from harts.backends.model.megatron.options import transformer_config

        same = config_of(settings.to_dict(), dtype=theirs.dtype, recompute=theirs.recompute)
        assert ours.model_dump(exclude={"pattern", "overrides"}) == same.model_dump(exclude={"pattern", "overrides"})
        assert ours.kinds == same.kinds
        assert transformer_config(ours) == transformer_config(same)
        monkeypatch.setattr(run, "initialise", lambda *_: None)
        with torch.device("meta"):
            made = run.built(ours, "meta").module
        count = sum(each.numel() for each in made.parameters())
    assert count == sum(each.numel() for each in wanted.parameters()) == 7_914_621_984
