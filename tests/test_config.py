"""Pipeline files: every fault at once, located, in words; what a good file becomes."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import PositiveInt

from harts import registry
from harts.config import load_settings
from harts.config.faults import Faults
from harts.config.yaml_tree import Tree, TreeReader
from harts.errors import ConfigError
from harts.ir import CompactLayout, CompactTrie, Partitions, PerMicrobatch, RoundPlan, SegmentTree
from harts.stages.base import Stage, StageConfig
from tests.work_models.tables import written as table

GOOD = """\
pipeline: [ingest, partition, schedule, call_plan, layout]
ingest: {type: toy, path: data/rollouts.jsonl}
partition:
  type: toy
  capacity: 4096
  max_tokens_per_microbatch: 32768
  data_parallel: 2
  tolerance: 1e-3
schedule: {type: toy}
call_plan: {type: toy, chunk_size: 64}
layout: {type: toy, conv_width: "${call_plan.chunk_size}"}
observe: {verify: on, print: [round_plan]}
"""


class ToyIngest(Stage[None, CompactTrie]):
    class Config(StageConfig):
        path: Path

    def run(self, value, /):
        raise NotImplementedError


class Nested(StageConfig):
    depth: PositiveInt = 1


class ToyPartition(Stage[CompactTrie, Partitions]):
    class Config(StageConfig):
        capacity: PositiveInt
        max_tokens_per_microbatch: PositiveInt = 1
        data_parallel: PositiveInt = 1
        tolerance: float = 0.5
        search: Nested = Nested()

    def run(self, value, /):
        raise NotImplementedError


class Measured(ToyPartition, Stage[CompactTrie, Partitions]):
    needs_work_model = True


class ToySchedule(Stage[Partitions, PerMicrobatch[SegmentTree]]):
    def run(self, value, /):
        raise NotImplementedError


class ToyCallPlan(Stage[SegmentTree, RoundPlan]):
    class Config(StageConfig):
        chunk_size: PositiveInt

    def run(self, value, /):
        raise NotImplementedError


class ToyLayout(Stage[RoundPlan, CompactLayout]):
    class Config(StageConfig):
        conv_width: PositiveInt

    def run(self, value, /):
        raise NotImplementedError


class TakesTrie(Stage[CompactTrie, CompactLayout]):
    Config = ToyLayout.Config

    def run(self, value, /):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.setattr(registry, "_added", {})
    for kind, cls in {
        "ingest": ToyIngest,
        "partition": ToyPartition,
        "schedule": ToySchedule,
        "call_plan": ToyCallPlan,
        "layout": ToyLayout,
    }.items():
        registry.register(kind, "toy", f"{__name__}:{cls.__name__}", "toys")
    registry.register("partition", "measured", f"{__name__}:Measured", "toys")
    registry.register("layout", "takes_trie", f"{__name__}:TakesTrie", "toys")


def written(tmp_path, text):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return path


def faults(tmp_path, text, overrides=(), scope="plan"):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides, scope)
    assert caught.value.exit_code == 2
    return [line.replace(str(path), "p.yaml") for line in str(caught.value).splitlines()]


def only(tmp_path, text, overrides=(), scope="plan"):
    (line,) = faults(tmp_path, text, overrides, scope)
    return line


def test_good_file_is_read_with_defaults_and_interpolation(tmp_path):
    settings = load_settings(written(tmp_path, GOOD), scope="plan")
    assert settings.components["layout"].config.conv_width == 64
    assert settings.components["partition"].config.tolerance == 0.001
    assert settings.components["partition"].config.search.depth == 1
    assert settings.observe.verify == "on"
    assert settings.order == ("ingest", "partition", "schedule", "call_plan", "layout")
    assert settings.device == "cpu"


def test_missing_s_names_the_nearest_key(tmp_path):
    line = only(tmp_path, GOOD.replace("max_tokens_per", "max_token_per"))
    assert line.startswith("p.yaml:6:3: partition.max_token_per_microbatch: is not a key")
    assert "did you mean max_tokens_per_microbatch?" in line


def test_key_at_top_level_is_told_its_section(tmp_path):
    line = only(tmp_path, GOOD + "chunk_size: 64\n")
    assert line.startswith("p.yaml:13:1: chunk_size: ")
    assert "chunk_size belongs in call_plan" in line


def test_key_in_the_wrong_section_is_told_the_right_one(tmp_path):
    line = only(tmp_path, GOOD.replace("{type: toy, chunk_size: 64}", "{type: toy, chunk_size: 64, conv_width: 4}"))
    assert line.startswith("p.yaml:10:40: call_plan.conv_width: ")
    assert "conv_width belongs in layout" in line


def test_key_of_an_unknown_section_is_told_the_right_one(tmp_path):
    line = only(tmp_path, GOOD + "planner: {chunk_size: 64}\n")
    assert line == "p.yaml:13:11: planner.chunk_size: planner is no section; chunk_size belongs in call_plan"


def test_hyphen_is_told_the_underscore_and_nothing_else(tmp_path):
    line = only(tmp_path, GOOD.replace("chunk_size: 64}", "chunk-size: 64}").replace('"${call_plan.chunk_size}"', "4"))
    assert line == "p.yaml:10:24: call_plan.chunk-size: is not a key; did you mean chunk_size? known: chunk_size"


def test_quoted_integer_is_told_to_drop_the_quotes(tmp_path):
    line = only(tmp_path, GOOD.replace("data_parallel: 2", 'data_parallel: "4"'))
    want = 'partition.data_parallel: got the text "4"; wanted is an integer: write 4 without quotes'
    assert line == f"p.yaml:7:18: {want}"


def test_exponent_for_an_integer_is_written_out(tmp_path):
    line = only(tmp_path, GOOD.replace("capacity: 4096", "capacity: 1e5"))
    assert line.startswith("p.yaml:5:13: partition.capacity: got 1e5, ")
    assert line.endswith("wanted is an integer: write 100000")


def test_duplicate_key_names_both_lines(tmp_path):
    line = only(tmp_path, GOOD + "observe: {verify: off}\n")
    assert line == "p.yaml:13:1: observe: is written twice; first on line 12"


def test_tab_is_named_as_one(tmp_path):
    line = only(tmp_path, GOOD.replace("  capacity", "\tcapacity"))
    assert line.startswith("p.yaml:5:1: ")
    assert "here is a tab" in line


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "is empty"),
        ("[1, 2]", "is a list"),
        ("pipeline: [a", "is not YAML"),
        ("a: *b", "aliases"),
        ("a: \x07", "is not allowed in YAML"),
        ("a: " + 2000 * "[", "is nested too deeply"),
        ("? [a]\n: 1", "a key must be text"),
    ],
)
def test_what_is_no_mapping_of_keys_is_one_short_message(tmp_path, text, want):
    assert want in faults(tmp_path, text)[0]


def test_missing_file_and_binary_file_are_one_short_message(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_settings(tmp_path / "binary.yaml")


def test_python_tag_is_refused_and_never_runs(tmp_path):
    marker = tmp_path / "ran"
    payload = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{marker}]]"
    lines = faults(tmp_path, GOOD.replace("4096", payload))
    assert any("the tag !!python/object/apply:pathlib.Path.touch is refused" in line for line in lines)
    assert not marker.exists()


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    text = GOOD.replace("data_parallel: 2", 'data_parallel: "4"').replace("capacity: 4096", "capacity: 0")
    text = text.replace("schedule: {type: toy}", "schedule: {type: tpy}").replace("print: [round_plan]", "print: [x]")
    lines = faults(tmp_path, text + "oberve: {}\n", ["partition.search.depth=2.5", "nonsense"])
    places = ["p.yaml:5:13:", "p.yaml:7:18:", "p.yaml:9:18:", "p.yaml:12:30:", "p.yaml:13:1:", "--set", "--set"]
    assert [line.split(" ")[0] for line in lines] == places
    assert "it should be greater than 0" in lines[0]
    assert "did you mean toy?" in lines[2]
    assert "did you mean observe?" in lines[4]


def test_wrong_edge_names_both_stages_and_both_types(tmp_path):
    line = only(tmp_path, GOOD.replace("layout: {type: toy", "layout: {type: takes_trie"))
    assert line == (
        "p.yaml:1:52: pipeline[4]: layout (TakesTrie) takes CompactTrie, "
        "but call_plan (ToyCallPlan) before it gives PerMicrobatch[RoundPlan]"
    )


def test_first_stage_must_be_a_source(tmp_path):
    text = GOOD.replace("[ingest, partition, ", "[partition, ").replace(
        "ingest: {type: toy, path: data/rollouts.jsonl}\n", ""
    )
    line = only(tmp_path, text)
    assert "partition (ToyPartition) takes CompactTrie, but it is the first stage" in line


def test_pipeline_and_sections_must_agree(tmp_path):
    lines = faults(tmp_path, GOOD.replace("[ingest, ", "[ingest, ingest, shedule, ").replace("layout: {", "lay_out: {"))
    text = "\n".join(lines)
    assert "pipeline[1]: ingest is listed twice" in text
    assert 'pipeline[2]: got the text "shedule"; did you mean schedule?' in text
    assert "layout has no section in this file" in text
    assert "lay_out: is not a key; did you mean layout?" in text
    assert "layout: has no effect: `pipeline` does not list it" in only(tmp_path, GOOD.replace(", layout]", "]"))


def test_override_replaces_and_is_read_as_yaml(tmp_path):
    path = written(tmp_path, GOOD)
    given = ["partition.capacity=7", "partition.search.depth=3", "observe.print=[step_plan]", "observe.verify=off"]
    settings = load_settings(path, given, scope="plan")
    assert settings.components["partition"].config.capacity == 7
    assert settings.components["partition"].config.search.depth == 3
    assert settings.observe.print == ("step_plan",)
    assert settings.observe.verify == "off"


@pytest.mark.parametrize(
    ("override", "want"),
    [
        ("partition.capacity=1.5", "--set partition.capacity=1.5: partition.capacity: got 1.5"),
        ("partition.capacty=1", "--set partition.capacty=1: partition.capacty: is not a key; did you mean capacity?"),
        ("capacity=1", "--set capacity=1: capacity: is not a key here; capacity belongs in partition"),
        ("partition.capacity.x=1", "partition.capacity is 4096, which holds no keys"),
        ("pipeline.9=x", "is not an index"),
        ("=1", "is not of the form a.b=c"),
        ("device=[", "is not YAML"),
    ],
)
def test_fault_of_an_override_is_located_in_it(tmp_path, override, want):
    line = only(tmp_path, GOOD, [override])
    assert line.startswith("--set ")
    assert want in line


def test_interpolation_that_finds_nothing_is_located(tmp_path):
    line = only(tmp_path, GOOD.replace("call_plan.chunk_size}", "call_plan.chunk}"))
    assert line.startswith("p.yaml:11:33: layout.conv_width: ${call_plan.chunk}: ")


def test_relative_path_is_of_the_file_or_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    path = written(tmp_path / "sub", GOOD)
    monkeypatch.chdir(tmp_path)
    config = load_settings("sub/p.yaml", scope="plan").components["ingest"].config
    assert config.path == Path("sub/data/rollouts.jsonl")
    config = load_settings(path, ["ingest.path=other.jsonl"], "plan").components["ingest"].config
    assert config.path == Path("other.jsonl")


def test_planning_leaves_sections_of_execution_alone(tmp_path):
    text = GOOD.replace("layout]", "layout, execute]") + "execute: {type: nonsense}\nmodel: 3\n"
    settings = load_settings(written(tmp_path, text), scope="plan")
    assert settings.effective()["model"] == 3
    text = "\n".join(faults(tmp_path, text, scope="all"))
    for key in (
        "execute.type: got",
        "model.type: got 3",
        "linear_attention: is required",
        "full_attention: is required",
    ):
        assert key in text


MEASURED = GOOD.replace("partition:\n  type: toy", "partition:\n  type: measured")


@pytest.mark.parametrize("written_as", ["", "work_model: null\n", "work_model: {type: compact}\n"])
def test_work_model_is_compact_unless_the_file_says_otherwise(tmp_path, written_as):
    settings = load_settings(written(tmp_path, MEASURED + written_as), scope="plan")
    assert settings.components["work_model"].name == "compact"
    assert settings.effective()["work_model"] == {"type": "compact"}
    assert "work_model" not in load_settings(written(tmp_path, GOOD), scope="plan").effective()


def test_work_model_reads_a_table_beside_the_file(tmp_path):
    (tmp_path / "sub").mkdir()
    table(tmp_path / "sub")
    path = written(tmp_path / "sub", MEASURED + "work_model: {type: calibrated, table: table.json, chunk_size: 64}\n")
    settings = load_settings(path, scope="plan")
    assert settings.effective()["work_model"]["table"] == str(tmp_path / "sub" / "table.json")


def test_faults_of_a_work_model_are_located(tmp_path):
    text = MEASURED + "work_model: {type: calibrated, table: absent.json, chunk_size: 32}\n"
    assert faults(tmp_path, text) == [
        f"p.yaml:13:13: work_model: table: {tmp_path}/absent.json: cannot be read: No such file or directory",
        "p.yaml:13:64: work_model.chunk_size: is 32, but call_plan.chunk_size is 64",
    ]
    line = only(tmp_path, text.replace("calibrated", "calibrate"))
    assert line == (
        'p.yaml:13:20: work_model.type: got the text "calibrate"; did you mean calibrated? known: calibrated, compact'
    )
    lines = faults(tmp_path, MEASURED + "work_model: {type: calibrated, table: 4, chunk_sze: 64}\n")
    assert lines[0] == "p.yaml:13:39: work_model.table: got 4, an integer; wanted is text: put it in quotes"
    assert lines[1].startswith("p.yaml:13:42: work_model.chunk_sze: is not a key; did you mean chunk_size?")
    line = only(tmp_path, GOOD + "work_model: {type: compact}\n")
    assert line == "p.yaml:13:1: work_model: has no effect: no stage of `pipeline` asks for one"


def test_training_needs_its_stages_and_an_objective(tmp_path):
    text = "\n".join(faults(tmp_path, GOOD + "train: {learning_rate: 1.0, optimizer: adamm}\n", scope="all"))
    assert "train: needs the stage execute in `pipeline`" in text
    assert "train.objective.type: is required; known: grpo, ppo, sft" in text
    assert "did you mean adamw? known: sgd, adamw" in text


def test_effective_values_are_a_file_that_means_the_same(tmp_path):
    settings = load_settings(written(tmp_path, GOOD), ["partition.capacity=8"], scope="plan")
    again = load_settings(written(tmp_path, yaml.safe_dump(settings.effective())), scope="plan")
    assert again.effective() == settings.effective()
    assert again.effective()["partition"] == {
        "type": "toy",
        "capacity": 8,
        "max_tokens_per_microbatch": 32768,
        "data_parallel": 2,
        "tolerance": 0.001,
        "search": {"depth": 1},
    }
    json.dumps(settings.effective())


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("on", "on"), ("no", "no"), ("true", True), ("~", None), ("", None), ("010", 10), ("0x1f", 31), ("0o17", 15),
        ("1e-3", 0.001), ("1.", 1.0), (".5", 0.5), ("-.inf", float("-inf")), ("1_000", "1_000"), ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"), ("'1'", "1"), ("!!str 1", "1"), ("=", "="),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, want):
    found = Faults()
    value = TreeReader(Tree("x"), found).read(f"a: {text}")["a"]
    assert not found.found
    assert value == want
    assert type(value) is type(want)
