"""`harts calibrate`: what is measured, and the table that comes out, on a small CPU model."""

import json
from pathlib import Path

import numpy as np
import pytest

import harts
from harts.cli import main
from harts.errors import ConfigError
from harts.train.calibrate import largest, layouts, measure
from harts.train.calibrate_shapes import SIZES, batch, specs
from harts.work_models.counts import TERMS, counts
from harts.work_models.table import read_table

QUICKSTART = Path(__file__).resolve().parents[2] / "pipelines" / "quickstart.yaml"
SMALL = [
    "partition.capacity=400", "call_plan.chunk_size=16", "model.vocab_size=32", "model.hidden_size=16",
    "model.intermediate_size=16", "model.layers=2", "model.pattern=KA", "train.compare=null",
]  # fmt: skip


def options(*given):
    return [word for each in (*SMALL, *given) for word in ("--set", each)]


@pytest.mark.parametrize("largest_rows", [16, 17, 100, 8192])
def test_microbatches_hold_what_they_should_and_are_the_same_each_time(largest_rows):
    found = specs(largest_rows, 64, 16, np.random.default_rng(3))
    rows = [sum(tokens for _, tokens in spec) for spec in found]
    assert len(found) == SIZES
    assert (max(rows), min(rows)) == (largest_rows, max(16, largest_rows // 16))
    assert all(tokens >= 1 and parent < i for spec in found for i, (parent, tokens) in enumerate(spec))
    assert found == specs(largest_rows, 64, 16, np.random.default_rng(3))
    first, second = (batch(found, 32, np.random.default_rng(4)) for _ in range(2))
    assert first.digest() == second.digest()
    first.verify()


def test_planned_microbatches_are_the_specs_and_tell_all_terms_apart():
    pipeline = harts.load(QUICKSTART, ["model.layers=1", "model.moe=null"])
    planned = layouts(pipeline, 2048)
    sizes = {int(each.plan.tree.columns.group[0]): each.rows for each in planned.items}
    found = specs(2048, 64, pipeline.env.model.head_weight().shape[0], np.random.default_rng(0))
    assert sizes == {i: sum(tokens for _, tokens in spec) for i, spec in enumerate(found)}
    counted = np.stack([counts(each) for each in planned.items])
    assert np.linalg.matrix_rank(counted / np.linalg.norm(counted, axis=0)) == len(TERMS)
    assert counted[:, TERMS.index("round")].max() >= 4


def test_each_microbatch_is_run_and_gradients_are_gone_afterwards():
    pipeline = harts.load(QUICKSTART, SMALL)
    planned = layouts(pipeline, 64)
    seen = []
    right = type(pipeline.stage("execute")).run
    pipeline.stage("execute").run = lambda layout: seen.append(layout) or right(pipeline.stage("execute"), layout)
    measured = measure(pipeline, planned, repeats=2)
    assert seen == [*planned.items] * 3
    assert (measured.nanoseconds > 0).all()
    assert np.isfinite(measured.nanoseconds).all()
    assert 0 < measured.held_out.sum() < SIZES / 2
    assert all(parameter.grad is None for parameter in pipeline.env.model.module.parameters())


def test_table_is_written_printed_and_planned_with(tmp_path, capsys):
    out = tmp_path / "table.json"
    words = ["calibrate", str(QUICKSTART), *options(), "--repeats", "1", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    table = read_table(out)
    assert max(table.coefficients.model_dump().values()) > 0
    assert (table.measured.rows[1], table.measured.repeats, table.measured.chunk_size) == (100, 1, 16)
    assert table.measured.sections["model"]["layers"] == 2
    assert (table.measured.dtype, table.measured.microbatches + table.error.microbatches) == ("float64", SIZES)
    named = f"work_model={{type: calibrated, table: {out}, chunk_size: 16}}"
    assert main(["check", str(QUICKSTART), *options(named)]) == 0
    capsys.readouterr()
    assert main([*words, "--set", "train=null"]) == 0
    text = capsys.readouterr().out
    assert "Predicted against measured time of 5 others:" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_rows_come_from_the_capacity_or_the_command(tmp_path):
    small = harts.load(QUICKSTART, SMALL)
    assert (largest(small, None), largest(small, 400)) == (100, 400)
    with pytest.raises(ConfigError, match=r"--rows: is 401, but .*: partition.capacity is 400"):
        largest(small, 401)
    with pytest.raises(ConfigError, match="--rows: is 15; the largest microbatch needs 16 rows at least"):
        largest(small, 15)
    with pytest.raises(ConfigError, match=r"partition.capacity / 4: is 10; "):
        largest(harts.load(QUICKSTART, [*SMALL, "partition.capacity=40"]), None)
    with pytest.raises(ConfigError, match=r"partition.capacity: sets no limit, so --rows must say"):
        largest(harts.load(QUICKSTART, [*SMALL, "partition.capacity=null"]), None)


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--repeats", "0"], "0 is less than 1"),
        (["--set", "pipeline=[ingest, partition, schedule, call_plan, layout]", "--set", "execute=null"], "execute"),
        (["--out", "/nowhere/at/all.json"], "/nowhere/at/all.json: cannot be written: /nowhere/at is no folder"),
    ],
)
def test_wrong_usage_is_told(capsys, words, want):
    assert main(["calibrate", str(QUICKSTART), *options(), "--repeats", "1", *words]) == 2
    assert want in capsys.readouterr().err
