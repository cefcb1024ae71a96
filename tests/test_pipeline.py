"""Stages run, lifted over microbatches, resumed from every edge, and rerun from the input that failed."""

import shlex

import numpy as np
import pytest

import harts
from harts import registry
from harts.errors import ConfigError, InputError, PlanError
from harts.ir import PerMicrobatch
from harts.ir.codec import load, save
from harts.pipeline import Pipeline
from tests.forests import batch_of
from tests.toy_stages import FILE, Numbers, Part, Shifted, Split, register_toys, step_of
from tests.work_models.tables import written


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    register_toys(monkeypatch)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(FILE)
    return path


def test_stages_run_in_order_and_are_mapped_over_microbatches(path):
    made = harts.load(path).run()
    assert isinstance(made, PerMicrobatch)
    assert [type(item) for item in made.items] == [Shifted] * 3
    assert np.concatenate([item.values for item in made.items]).tolist() == [i * i + 5 for i in range(10)]
    assert made.items[1].squares.part.values.tolist() == [4, 5, 6]


def test_only_stages_after_the_split_are_mapped(path):
    assert [lift.mapped for lift in harts.load(path).lifts] == [False, False, True, True]


def test_wrong_edge_fails_at_load_and_names_both_stages_and_types(path):
    with pytest.raises(ConfigError) as caught:
        harts.load(path, ["layout={type: wants_numbers}"])
    text = "layout (WantsNumbers) takes Numbers, but call_plan (Square) before it gives PerMicrobatch[Squares]"
    assert str(caught.value) == f"{path}:1:42: pipeline[3]: {text}"


def test_every_dumped_edge_resumes_with_bit_equal_results(path, tmp_path):
    dump = tmp_path / "dump"
    whole = harts.load(path, [f"observe.dump={dump}"]).run()
    names = ["01_ingest.harts", "02_partition.harts", "03_call_plan.harts", "04_layout.harts"]
    assert sorted(file.name for file in dump.iterdir()) == names
    for name in names:
        again = harts.load(path).resume(load(dump / name))
        assert again.digest() == whole.digest(), name


def test_resume_stops_where_it_is_told(path):
    pipeline = harts.load(path)
    value = pipeline.resume(Numbers(np.arange(4)), until="partition")
    assert [type(item) for item in value.items] == [Part] * 3


def test_value_of_one_microbatch_resumes_alone(path):
    part = Part(Numbers(np.arange(4)), np.array([2, 3]))
    assert harts.load(path).resume(part).values.tolist() == [9, 14]


def test_value_of_no_edge_is_refused_with_the_edges(path):
    with pytest.raises(InputError, match=r"RolloutBatch: no stage of .*toy\.yaml takes it; they take nothing, Numbers"):
        harts.load(path).resume(batch_of([[1, 2]]))


def test_plan_must_end_in_layouts(path):
    with pytest.raises(ConfigError, match=r"gives PerMicrobatch\[Shifted\]; a plan is PerMicrobatch\[CompactLayout\]"):
        harts.load(path).plan()


def test_failing_stage_saves_its_input_and_says_how_to_rerun(path, tmp_path):
    dump = tmp_path / "my dump"
    pipeline = harts.load(path, ["call_plan.fails_at=5", f"observe.dump={dump}"])
    with pytest.raises(PlanError) as caught:
        pipeline.run()
    (note,) = caught.value.__notes__
    words = shlex.split(note.partition("rerun it with: ")[2])
    assert words[:3] == ["harts", "run", str(path)]
    assert words[3:7] == ["--set", "call_plan.fails_at=5", "--set", f"observe.dump={dump}"]
    assert words[7] == "--from"
    saved = load(words[8])
    assert [type(item) for item in saved.items] == [Part] * 3
    assert harts.load(path).resume(saved).digest() == harts.load(path).run().digest()


def test_failing_stage_without_a_dump_folder_saves_into_a_temporary_one(path, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(PlanError) as caught:
        harts.load(path, ["call_plan.fails_at=5"]).run()
    saved = shlex.split(caught.value.__notes__[0])[-1]
    assert saved.startswith(str(tmp_path))
    load(saved)


def test_failing_source_says_how_to_rerun(path):
    with pytest.raises(Exception, match="must not be negative") as caught:
        harts.load(path, ["ingest.first=-3"], scope="plan").run()
    assert caught.value.__notes__ == [
        f"the stage ingest failed; rerun it with: harts plan {path} --set ingest.first=-3",
    ]


def test_saved_value_is_the_same_after_a_file(path, tmp_path):
    made = harts.load(path).run()
    save(made, tmp_path / "x.harts")
    assert load(tmp_path / "x.harts").digest() == made.digest()


class Priced(Split):
    needs_work_model = True

    def run(self, value, /):
        return PerMicrobatch(step_of(self.env.tables(2).along[1:]), ())


def test_stage_that_asks_for_a_work_model_gets_the_file_s(path, tmp_path):
    registry.register("partition", "priced", f"{__name__}:Priced", "toys")
    table = written(tmp_path, row=7.0, pair=1.0)
    given = ["partition.type=priced", "observe.verify=off"]
    assert harts.load(path, given).run(until="partition").step.cost.tolist() == [1, 2]
    given.append(f"work_model={{type: calibrated, table: {table}, chunk_size: 4}}")
    assert harts.load(path, given).run(until="partition").step.cost.tolist() == [8, 17]


def test_seconds_are_kept_for_every_stage(path):
    pipeline = Pipeline.load(path)
    pipeline.run()
    assert list(pipeline.seconds) == ["ingest", "partition", "call_plan", "layout"]
    assert all(value >= 0 for value in pipeline.seconds.values())
