"""`torchrun ... harts run`: every process plans, all agree, one reports; what fails on one fails on all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
from parity_bench.host import on_host
from harts.cli import main

words = [word.replace("RANK", os.environ.get("RANK", "0")) for word in sys.argv[1:]]
with on_host():
    raise SystemExit(main(words))
"""
TINY = [
    "device=cpu",
    "partition.capacity=400",
    "call_plan.chunk_size=8",
    "model.vocab_size=32",
    "model.hidden_size=16",
    "model.layers=4",
    "model.linear_heads=2",
    "model.linear_value_heads=2",
    "model.linear_key_dim=8",
    "model.linear_value_dim=8",
    "model.heads=2",
    "model.kv_rank=8",
    "model.nope_dim=8",
    "model.rope_dim=4",
    "model.value_dim=8",
    "model.head_dim=8",
    "model.intermediate_size=16",
    "model.moe={experts: 8, top_k: 2, intermediate_size: 8, shared_intermediate_size: 8, scoring: sigmoid}",
    "model.overrides.moe_router_num_groups=2",
    "model.overrides.moe_router_group_topk=1",
    "model.dtype=float32",
    "linear_attention={type: naive}",
    "full_attention={type: sdpa}",
    "train.steps=2",
    "train.learning_rate=1e-3",
]
SPLIT = ["model.parallel.pipeline=1", "model.parallel.expert=2", "model.parallel.tensor=2", "partition.replicas=1"]
PIPELINED = ["model.parallel.tensor=1", "model.parallel.expert=1", "model.parallel.pipeline=2"]
ALONE = ["model.parallel={tensor: 1, pipeline: 1, expert: 1}", "partition.replicas=1"]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each rank; the third is of other tokens."""
    folder = tmp_path_factory.mktemp("rollouts")
    trunk = [(7 * i) % 30 for i in range(40)]
    for name, change in (("0", 0), ("1", 0), ("other0", 0), ("other1", 1)):
        with (folder / f"{name}.jsonl").open("w") as out:
            for leaf in range(6):
                tokens = trunk[: 12 + 4 * leaf] + [(leaf + change + i) % 32 for i in range(10)]
                mask = [0] * 12 + [1] * (len(tokens) - 12)
                row = {"id": str(leaf), "group": "g", "tokens": tokens, "loss_mask": mask, "reward": float(leaf % 3)}
                out.write(json.dumps(row) + "\n")
    return folder


def run(processes: int, tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "launched.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), "run"]
    command += [str(ROOT / "pipelines/kda_mla_megatron.yaml"), "--json"]
    for each in [*TINY, *overrides]:
        command += ["--set", each]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


def test_two_processes_report_what_one_does(tmp_path: Path, rollouts: Path) -> None:
    path = f"ingest.path={rollouts}/RANK.jsonl"
    alone = run(1, tmp_path, path, *ALONE, "model.parallel.distributed_optimizer=false")
    split = run(2, tmp_path, path, *SPLIT)
    assert alone.returncode == 0, alone.stderr
    assert split.returncode == 0, split.stderr
    one, two = (json.loads(each.stdout) for each in (alone, split))
    assert one["sharing"] == two["sharing"]
    for ours, theirs in zip(two["train"], one["train"], strict=True):
        for name in ("loss", "policy_loss", "router_z", "router_balance", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
        assert ours["trained_tokens"] == theirs["trained_tokens"]


def test_a_step_that_cannot_be_planned_fails_alike_on_every_rank(tmp_path: Path, rollouts: Path) -> None:
    found = run(2, tmp_path, f"ingest.path={rollouts}/0.jsonl", *SPLIT, "partition.capacity=20")
    assert found.returncode != 0
    (told,) = set(ranks(found).values())
    assert "more than the capacity of 20 compact tokens" in told


def test_ranks_that_differ_stop_before_the_step(tmp_path: Path, rollouts: Path) -> None:
    found = run(2, tmp_path, f"ingest.path={rollouts}/otherRANK.jsonl", *SPLIT)
    assert found.returncode != 0
    told = ranks(found).values()
    assert told
    assert all(text.startswith("the ranks hold different plans of this step") for text in told)


def test_gradients_that_are_not_finite_are_an_error_on_every_rank(tmp_path: Path, rollouts: Path) -> None:
    found = run(2, tmp_path, f"ingest.path={rollouts}/0.jsonl", *SPLIT, *PIPELINED, "model.init_std=1e30")
    assert found.returncode != 0
    (told,) = set(ranks(found).values())
    assert told == "parameter decoder.layers.0.input_layernorm.weight: its gradient is not finite"


def test_what_does_not_fit_the_processes_is_told_before_anything_is_planned(tmp_path: Path, rollouts: Path) -> None:
    found = run(2, tmp_path, f"ingest.path={rollouts}/absent.jsonl", *SPLIT, "layout.row_multiple=1")
    assert found.returncode != 0
    (told,) = set(ranks(found).values())
    assert "its rows are split over processes in 2 parts, but layout.row_multiple is 1" in told


def ranks(found: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """First line of what each rank said at last; `torchrun` may end the others as soon as one has failed."""
    lines = [line for line in found.stderr.splitlines() if line.startswith("rank ")]
    return {line[5]: line[8:] for line in lines}
