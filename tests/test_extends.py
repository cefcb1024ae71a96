"""A pipeline file that extends another."""

from pathlib import Path

import pytest

from harts.config import load_settings
from harts.errors import ConfigError

BASE = """\
pipeline: [ingest, partition, schedule, call_plan, layout]
ingest: {type: jsonl, path: rollouts.jsonl}
partition: {type: paper, capacity: 4096}
schedule: {type: slots}
call_plan: {type: min_call, chunk_size: 64}
layout: {type: round_major, conv_width: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ablations").mkdir()
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "ablations" / "child.yaml"
    path.write_text("extends: ../base.yaml\n" + text)
    return path


def test_changes_are_merged_over_the_base(folder: Path):
    settings = load_settings(write(folder, "call_plan: {type: flat}\npartition: {replicas: 2}\n"), scope="plan")
    found = settings.effective()
    assert found["call_plan"] == {"type": "flat", "chunk_size": 64}
    assert found["partition"]["capacity"] == 4096
    assert found["partition"]["replicas"] == 2
    assert "extends" not in found


def test_a_path_is_relative_to_the_file_that_holds_it(folder: Path):
    base = load_settings(write(folder, ""), scope="plan")
    assert base.components["ingest"].config.path == folder / "ablations" / ".." / "rollouts.jsonl"
    child = load_settings(write(folder, "ingest: {path: mine.jsonl}\n"), scope="plan")
    assert child.components["ingest"].config.path == folder / "ablations" / "mine.jsonl"


def test_a_fault_names_the_file_and_line_of_the_value(folder: Path):
    (folder / "base.yaml").write_text(BASE.replace("chunk_size: 64", "chunk_size: 0"))
    with pytest.raises(ConfigError) as raised:
        load_settings(write(folder, "layout: {conv_width: -1}\n"), scope="plan")
    message = str(raised.value)
    assert "base.yaml:5:" in message
    assert "child.yaml:2:" in message


def test_a_file_cannot_extend_itself(folder: Path):
    (folder / "base.yaml").write_text("extends: ablations/child.yaml\n" + BASE)
    with pytest.raises(ConfigError, match=r"extends: .* extends this file in turn"):
        load_settings(write(folder, ""), scope="plan")


@pytest.mark.parametrize(("name", "message"), [("nowhere.yaml", "cannot be read"), ("[1]", "wanted is the path")])
def test_a_base_that_is_no_file_is_a_fault(folder: Path, name: str, message: str):
    path = folder / "child.yaml"
    path.write_text(f"extends: {name}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings(path, scope="plan")
