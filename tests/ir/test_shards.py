"""A process can read its own microbatches alone."""

from pathlib import Path

import pytest

from harts.cli import main
from harts.errors import CodecError
from harts.ir import CompactLayout, StepPlan
from harts.ir.shards import load_microbatch, load_step, save_shards
from harts.pipeline import Pipeline

QUICKSTART = Path(__file__).resolve().parents[2] / "pipelines" / "quickstart.yaml"


def test_each_microbatch_and_the_step_come_back_equal(tmp_path: Path):
    layouts = Pipeline.load(QUICKSTART, scope="plan").plan()
    save_shards(layouts, tmp_path / "shards")
    assert load_step(tmp_path / "shards").digest() == layouts.step.digest()
    for index, layout in enumerate(layouts.items):
        assert load_microbatch(tmp_path / "shards", index).digest() == layout.digest()


def test_one_microbatch_needs_no_other_file(tmp_path: Path):
    assert main(["plan", str(QUICKSTART), "--split", str(tmp_path), "--quiet", "--json"]) == 0
    step = load_step(tmp_path)
    assert isinstance(step, StepPlan)
    last = len(step.work) - 1
    for index in range(last):
        (tmp_path / f"microbatch_{index:04}.harts").unlink()
    layout = load_microbatch(tmp_path, last)
    assert isinstance(layout, CompactLayout)
    assert layout.rows == step.work[last]
    with pytest.raises(CodecError, match="microbatch_0000"):
        load_microbatch(tmp_path, 0)


def test_a_step_file_that_holds_something_else_is_refused(tmp_path: Path):
    layouts = Pipeline.load(QUICKSTART, scope="plan").plan()
    save_shards(layouts, tmp_path)
    (tmp_path / "microbatch_0000.harts").replace(tmp_path / "step.harts")
    with pytest.raises(CodecError, match="holds a compact_layout, wanted is a step_plan"):
        load_step(tmp_path)
