"""What is resumed from is checked first, and the command that reruns a failure reproduces it."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from harts import registry
from harts.cli import main
from harts.errors import ConfigError, VerifyError
from harts.ir.codec import load, save
from harts.ir.shards import load_microbatch
from harts.pipeline import Pipeline

QUICKSTART = Path(__file__).resolve().parents[1] / "pipelines" / "quickstart.yaml"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    assert main(["plan", str(QUICKSTART), "--dump", str(folder), "--quiet", "--json"]) == 0
    return folder


def tampered(dumps: Path, name: str, field: str, target: Path) -> Path:
    """The dump with one entry of one array of its first item changed."""
    value = load(dumps / name)
    array = getattr(value.items[0], field).copy()
    array[-1] += 7
    save(replace(value, items=(replace(value.items[0], **{field: array}), *value.items[1:])), target)
    return target


@pytest.mark.parametrize(
    ("name", "field"),
    [("05_layout.harts", "position_ids"), ("04_call_plan.harts", "segment"), ("03_schedule.harts", "parent")],
)
def test_a_broken_value_is_refused_before_anything_runs(dumps: Path, tmp_path: Path, name: str, field: str):
    broken = tampered(dumps, name, field, tmp_path / "broken.harts")
    with pytest.raises(VerifyError, match=rf"{field}\["):
        Pipeline.load(QUICKSTART, scope="plan").resume(load(broken))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "04_call_plan.harts",
            "call_plan.chunk_size=32",
            "call_plan.chunk_size: is 32, but the value was planned with 64",
        ),
        ("05_layout.harts", "model.conv_width=3", "layout.conv_width: is 3, but the value was planned with 4"),
    ],
)
def test_settings_that_contradict_the_value_are_refused(dumps: Path, name: str, change: str, message: str):
    with pytest.raises(ConfigError, match=message):
        Pipeline.load(QUICKSTART, [change], scope="plan").resume(load(dumps / name))


def test_the_rerun_command_keeps_the_observers(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    off = tmp_path / "off.yaml"
    off.write_text(f"extends: {QUICKSTART}\nobserve: {{verify: off}}\nlayout: {{max_replay_rows: 1}}\n")
    words = ["plan", str(off), "--verify", "roundtrip", "--dump", str(tmp_path / "d")]
    assert main(words) == 1
    command = shlex.split(capsys.readouterr().err.rpartition("rerun it with: ")[2])
    assert command[command.index("--verify") + 1] == "roundtrip"
    assert command[command.index("--dump") + 1] == str(tmp_path / "d")
    assert main(command[1:]) == 1


def test_shards_of_an_earlier_plan_do_not_remain(tmp_path: Path):
    assert main(["plan", str(QUICKSTART), "--split", str(tmp_path), "--json"]) == 0
    assert (tmp_path / "microbatch_0003.harts").exists()
    sets = ["--set", "partition.capacity=null", "--set", "partition.replicas=1"]
    assert main(["plan", str(QUICKSTART), *sets, "--split", str(tmp_path), "--json"]) == 0
    assert load_microbatch(tmp_path, 0) is not None
    assert not (tmp_path / "microbatch_0001.harts").exists()


def test_training_can_be_switched_off():
    assert Pipeline.load(QUICKSTART, ["train=null"]).settings.train is None


def test_explain_says_what_a_value_means(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(QUICKSTART), "--plan"]) == 0
    assert "Compact tokens that a microbatch may hold; null is no limit." in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check", "--json"], ["plan", str(QUICKSTART), "--nonsense", "--json"]])
def test_wrong_usage_is_one_json_object_and_code_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == "ConfigError"
    assert "usage: harts" in captured.err


def test_a_plug_in_that_fails_to_import_is_named_and_takes_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_plug_in.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_added", {"layout": {"broken": ("broken_plug_in:Layout", "acme")}})
    with pytest.raises(ConfigError, match="'broken' of acme cannot be imported: RuntimeError: no licence"):
        registry.resolve("layout", "broken")
    assert main(["backends", "--json"]) == 0
