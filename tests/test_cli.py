"""The command line on made-up stages: exit codes, streams, JSON, faults without a trace."""

import json
import subprocess
import sys

import pytest
import yaml

import harts
from harts.cli import main
from harts.ir.codec import load
from tests.toy_stages import FILE, register_toys


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    register_toys(monkeypatch)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def dumps(path, tmp_path):
    folder = tmp_path / "dumps"
    harts.load(path, [f"observe.dump={folder}"]).run()
    return folder


def test_check_says_ok(call, path):
    code, out, err = call("check", path)
    assert (code, err) == (0, "")
    assert out == f"{path}: ok (ingest: count, partition: split, call_plan: square, layout: shift)\n"


def test_check_reports_every_fault_and_no_trace(call, path):
    code, out, err = call("check", path, "--set", "partition.parts=0", "--set", "partition.prats=1")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "--set partition.parts=0: partition.parts: got 0, an integer; it should be greater than 0",
        "--set partition.prats=1: partition.prats: is not a key; did you mean parts? known: parts",
    ]


def test_json_of_a_fault_is_one_object(call, path):
    code, out, err = call("check", path, "--json", "--set", "partition.parts=0")
    assert code == 2
    report = json.loads(out)
    assert report["error"] == "ConfigError"
    assert report["messages"] == err.splitlines()


@pytest.mark.parametrize("command", ["check", "explain", "plan", "run", "calibrate"])
def test_missing_file_is_bad_usage_in_one_line(call, tmp_path, command):
    code, out, err = call(command, tmp_path / "absent.yaml")
    assert (code, out) == (2, "")
    assert err == f"{tmp_path}/absent.yaml: cannot be read: No such file or directory\n"


def test_unknown_option_and_no_command_are_bad_usage(capsys):
    for words in (["check", "x.yaml", "--nonsense"], []):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("usage: harts")
        assert "Traceback" not in captured.err


def test_explain_shows_edges_configs_and_packages(call, path):
    code, out, _ = call("explain", path)
    assert code == 0
    assert "partition: split  (tests.toy_stages:Split, toys)\n" in out
    assert "  PerMicrobatch[Squares] -> PerMicrobatch[Shifted], each microbatch\n    by: 5\n" in out
    report = json.loads(call("explain", path, "--json")[1])
    assert [stage["takes"] for stage in report["stages"]][:2] == ["nothing", "Numbers"]


def test_explain_shows_the_work_model_that_serves(call, path, tmp_path):
    from pathlib import Path

    from tests.work_models.tables import written

    file = Path(__file__).resolve().parents[1] / "pipelines" / "plan_only.yaml"
    code, out, _ = call("explain", file, "--plan")
    assert code == 0
    assert "\nwork_model: compact  (harts.work_models.compact:Compact, harts)\n" in out
    assert "work_model" not in call("explain", path)[1]
    named = f"work_model={{type: calibrated, table: {written(tmp_path)}, chunk_size: 64}}"
    out = call("explain", file, "--plan", "--set", named)[1]
    assert "\nwork_model: calibrated  (harts.work_models.calibrated:Calibrated, harts)\n" in out
    assert f"    table: {tmp_path}/table.json\n" in out
    report = json.loads(call("explain", file, "--plan", "--set", named, "--json")[1])
    assert report["work_model"]["config"]["chunk_size"] == 64


@pytest.mark.parametrize("command", ["check", "explain", "plan", "run", "calibrate"])
def test_effective_values_are_printed_and_nothing_runs(call, path, command):
    code, out, _ = call(command, path, "--print-config", "--set", "partition.parts=4")
    assert code == 0
    values = yaml.safe_load(out)
    assert values["partition"] == {"type": "split", "parts": 4}
    assert values["ingest"] == {"type": "count", "count": 10, "first": 0}
    assert values["observe"]["verify"] == "on"
    assert json.loads(call(command, path, "--print-config", "--json")[1])["device"] == "cpu"


def test_plan_of_a_file_that_ends_elsewhere_is_bad_config(call, path):
    code, out, err = call("plan", path)
    assert (code, out) == (2, "")
    assert "pipeline: gives PerMicrobatch[Shifted]; a plan is PerMicrobatch[CompactLayout]" in err


def test_run_of_a_file_without_execution_points_to_plan(call, path):
    code, out, err = call("run", path)
    assert (code, out) == (2, "")
    assert err == f"{path}: pipeline: a run ends with restore; `harts plan` runs planning alone\n"


def test_failing_stage_prints_its_text_and_the_rerun_command(call, path, tmp_path):
    given = ["--set", "call_plan.fails_at=5", "--dump", tmp_path / "d"]
    code, out, err = call("plan", path, *given)
    assert (code, out) == (1, "")
    text, note = err.splitlines()
    assert text == "5 cannot be squared"
    dump = f"{tmp_path}/d"
    command = f"harts plan {path} --set call_plan.fails_at=5 --dump {dump} --from {dump}/failed_call_plan_input.harts"
    assert note == f"the stage call_plan failed; rerun it with: {command}"
    assert load(tmp_path / "d" / "failed_call_plan_input.harts").kind == "per_microbatch"
    assert call(*command.split()[1:])[0] == 1


def test_a_bug_shows_a_trace(path, monkeypatch):
    monkeypatch.setattr("tests.toy_stages.Square.run", lambda self, part: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        main(["plan", str(path)])
    assert "rerun it with: harts plan" in caught.value.__notes__[0]


def test_inspect_prints_text_digest_and_json(call, dumps):
    file = dumps / "01_ingest.harts"
    code, out, _ = call("inspect", file)
    assert code == 0
    assert out.startswith("toy_numbers v1")
    digest = load(file).digest()
    assert call("inspect", file, "--digest")[1] == digest + "\n"
    report = json.loads(call("inspect", file, "--json")[1])
    assert (report["kind"], report["version"], report["digest"]) == ("toy_numbers", 1, digest)


def test_inspect_cuts_at_the_limit_and_picks_a_microbatch(call, dumps):
    file = dumps / "04_layout.harts"
    assert call("inspect", file, "--limit", 2)[1].splitlines()[2].endswith("more lines")
    assert call("inspect", file, "--item", 1)[1].startswith("toy_shifted v1")
    code, _, err = call("inspect", file, "--item", 3)
    assert (code, err) == (1, "--item 3: there are 3 microbatches, numbered from 0\n")


def test_inspect_of_another_file_is_refused(call, path):
    code, out, err = call("inspect", path)
    assert (code, out) == (1, "")
    assert str(path) in err


def test_diff_is_0_for_equal_and_1_for_different(call, path, dumps, tmp_path):
    first = dumps / "04_layout.harts"
    assert call("diff", first, first)[:2] == (0, "equal\n")
    harts.load(path, ["layout.by=6", f"observe.dump={tmp_path}/other"]).run()
    code, out, _ = call("diff", first, tmp_path / "other" / "04_layout.harts")
    assert code == 1
    assert "items[0].values" in out
    report = json.loads(call("diff", first, tmp_path / "other" / "04_layout.harts", "--json")[1])
    assert report["equal"] is False
    assert report["differences"]


def test_backends_lists_names_packages_and_what_is_missing(call, monkeypatch):
    from harts import registry

    registry.register("models", "broken", "no_such_module:X", "acme")
    code, out, _ = call("backends")
    assert code == 0
    assert "layout" in out.splitlines()
    assert any(line.split() == ["shift", "toys", "ok"] for line in out.splitlines())
    report = json.loads(call("backends", "--json")[1])
    assert report["models"]["broken"]["package"] == "acme"
    assert "No module named 'no_such_module'" in report["models"]["broken"]["why_not"]
    assert report["linear_attention"]["naive"]["why_not"] is None
    assert set(report["work_models"]) == {"compact", "calibrated"}


def test_reader_that_goes_away_is_no_trace():
    command = f"{sys.executable} -c 'import sys; from harts.cli import main; sys.exit(main())' backends | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
