"""`harts explain --from`: what a dumped plan says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harts.cli import main
from harts.ir.codec import load, save
from tests.forests import trie_of

PIPELINE = str(Path(__file__).resolve().parents[1] / "pipelines" / "plan_only.yaml")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    small = ["--set", "partition.capacity=4096", "--set", "partition.replicas=2", "--set", "partition.rounds=50"]
    assert main(["plan", PIPELINE, *small, "--dump", str(folder), "--quiet"]) == 0
    return folder


def test_bounds_and_candidates_are_those_of_the_plan(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = load(dumps / "03_schedule.harts").step  # type: ignore[attr-defined]
    for edge in ("03_schedule.harts", "05_layout.harts"):
        assert main(["explain", PIPELINE, "--plan", "--from", str(dumps / edge), "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert plan["lower_bound"] == step.lower_bound
        assert plan["work"] == step.work.sum()
        assert plan["total_gap"] == plan["work"] / plan["lower_bound"] - 1 >= 0
        assert plan["slot_critical_gap"] == plan["slot_critical_work"] / plan["slot_critical_bound"] - 1
        assert plan["optimal"] == (plan["work"] == plan["lower_bound"])
        chosen = [each for each in plan["candidates"] if each["chosen"]]
        assert [each["slot_critical"] for each in chosen] == [plan["slot_critical_work"]]
        assert len(plan["candidates"]) == len(step.candidates) > 2


def test_the_text_says_how_far_the_plan_is_above_its_bound(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", PIPELINE, "--plan", "--from", str(dumps / "03_schedule.harts")]) == 0
    out = capsys.readouterr().out
    assert "above the bound of" in out
    assert "    chosen  " in out


def test_a_value_without_a_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(trie_of([[1, 2]]), tmp_path / "trie.harts")
    assert main(["explain", PIPELINE, "--plan", "--from", str(tmp_path / "trie.harts")]) == 1
    assert "--from: a compact_trie holds no plan; dump the edge of the schedule stage" in capsys.readouterr().err
