"""The bundled pipelines on real stages: plan without torch, train with parity, resume every edge bit for bit."""

import gzip
import json
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import harts
from harts.errors import ConfigError
from harts.ir import PerMicrobatch
from harts.ir.codec import load
from tests.forests import batch_of, random_trajectories
from tests.shared import shared_data

PIPELINES = Path(__file__).resolve().parents[1] / "pipelines"
QUICKSTART = PIPELINES / "quickstart.yaml"
SYNTHETIC = {"trajectories": 96, "semantic_tokens": 46727, "compact_tokens": 19175}
"""What the README of the data says of the bundled rollouts."""


@pytest.fixture
def small(tmp_path):
    """Options that run the quickstart on a few small trees."""
    rng = random.Random(5)
    file = tmp_path / "rollouts.jsonl"
    with file.open("w") as out:
        for i, tokens in enumerate(random_trajectories(rng, chunk=16, roots=2, forks=4)):
            mask = [0] + [int(rng.random() < 0.5) for _ in tokens[1:]]
            row = {
                "id": f"t{i}",
                "group": f"g{i % 2}",
                "reward": float(i % 3 == 0),
                "tokens": tokens,
                "loss_mask": mask,
            }
            out.write(json.dumps(row) + "\n")
    given = [f"ingest.path={file}", "partition.capacity=150", "call_plan.chunk_size=16"]
    given += ["model.vocab_size=16", "model.hidden_size=16", "model.intermediate_size=16"]
    return given


def options(given):
    return [word for each in given for word in ("--set", each)]


@pytest.mark.parametrize("path", sorted(PIPELINES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_bundled_file_is_valid(call, path):
    code, _, err = call("check", path)
    if "device: cuda" in path.read_text() and not torch.cuda.is_available():
        assert (code, err.count("\n")) == (2, 1)  # all else is in order
        assert err.startswith(f"{path}: device: 'cuda' cannot be used: ")
    else:
        assert (code, err) == (0, "")


def test_explain_of_a_device_that_is_not_here_is_one_message(call):
    code, out, err = call("explain", QUICKSTART, "--set", "device=cuda:99")
    assert (code, out) == (2, "")
    assert err.startswith(f"{QUICKSTART}: device: 'cuda:99' cannot be used: ")


def test_plan_reports_sharing_of_the_bundled_rollouts(call):
    code, out, _ = call("plan", PIPELINES / "plan_only.yaml", "--verify", "roundtrip", "--json")
    assert code == 0
    report = json.loads(out)
    assert {key: report["sharing"][key] for key in SYNTHETIC} == SYNTHETIC
    assert report["microbatches"]["count"] % report["microbatches"]["replicas"] == 0
    assert list(report["seconds"]) == ["ingest", "partition", "schedule", "call_plan", "layout"]


def test_text_of_a_plan_fits_80_columns(call):
    code, out, _ = call("plan", QUICKSTART)
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "19,175" in out
    assert "  key/value rows of branches         46,727  2.44 a compact row, if expanded\n" in out


def test_plan_never_imports_torch():
    block = "import sys; sys.modules['torch'] = None; from harts.cli import main; sys.exit(main(sys.argv[1:]))"
    for words in (["plan", str(PIPELINES / "plan_only.yaml")], ["plan", str(QUICKSTART)], ["explain", str(QUICKSTART)]):
        done = subprocess.run([sys.executable, "-c", block, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "min_call" in done.stdout or "19,175" in done.stdout


def test_quickstart_trains_with_parity(call, small):
    code, out, err = call("run", QUICKSTART, *options(small), "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["comparison"]["passed"]
    assert report["comparison"]["steps"][0]["gradient"] <= 1e-10
    assert report["comparison"]["row_ratio"] > 1
    assert report["train"][0]["gradient_norm"] > 0
    assert report["microbatches"]["count"] > 1


def test_quickstart_as_it_is_trains_with_parity(call):
    code, out, err = call("run", QUICKSTART, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["sharing"]["semantic_tokens"], report["sharing"]["compact_tokens"]) == (46_727, 19_175)
    assert report["comparison"]["passed"]
    assert report["comparison"]["tolerance"] == 1e-10


ONE_OF_EACH = ("tau-airline/t01", "toolbench/G1_69", "swe/django__django-16255")
"""Tasks of three agents; all eleven tasks take minutes."""


@pytest.mark.slow
def test_real_rollouts_train_their_step_with_parity(call, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with gzip.open(shared_data() / "quickstart" / "rollouts_dense.jsonl.gz", "rt") as rows:
        path.write_text("".join(row for row in rows if json.loads(row)["group"] in ONE_OF_EACH))
    code, out, err = call("run", QUICKSTART, "--set", f"ingest.path={path}", "--json")
    assert code == 0, err
    report = json.loads(out)
    sharing = report["sharing"]
    assert (sharing["trajectories"], sharing["semantic_tokens"], sharing["compact_tokens"]) == (30, 70_214, 14_349)
    assert report["train"][0]["trained_tokens"] == 6_552
    assert report["comparison"]["passed"]
    assert report["comparison"]["steps"][0]["gradient"] <= 1e-10


def test_failing_parity_is_exit_code_1_and_shows_no_speed(call, small, monkeypatch):
    from harts.stages.execute.compact import Compact

    right = Compact.run

    def wrong_where_rows_are_shared(self, layout):
        outputs = right(self, layout)
        shared = layout.rows < layout.plan.tree.semantic_tokens
        return replace(outputs, hidden=outputs.hidden * 1.0001) if shared else outputs

    monkeypatch.setattr(Compact, "run", wrong_where_rows_are_shared)
    code, out, _ = call("run", QUICKSTART, *options(small))
    assert code == 1
    assert "FAILS" in out
    assert "log-probs differ by" in out
    assert "time, flat / compact" not in out


@pytest.mark.parametrize("ablation", ["no_replay", "flat"])
def test_ablations_run(call, small, ablation):
    code, out, _ = call("run", PIPELINES / "ablations" / f"{ablation}.yaml", *options(small), "--json")
    assert code == 0
    assert json.loads(out)["rounds"]["replay_rows"] == 0


def test_run_without_training_reports_log_probs(call, small, tmp_path):
    text = "".join(QUICKSTART.read_text().partition("train:")[:1])
    path = tmp_path / "no_train.yaml"
    path.write_text(text)
    code, out, err = call("run", path, *options(small), "--json")
    assert code == 0, err
    report = json.loads(out)
    predicted = report["sharing"]["semantic_tokens"] - report["sharing"]["trajectories"]
    assert report["restored"]["logprobs"]["count"] == predicted
    assert report["restored"]["entropy"]["min"] > 0


def test_every_dumped_edge_of_the_whole_pipeline_resumes_bit_equal(small, tmp_path):
    dump = tmp_path / "dump"
    whole = harts.load(QUICKSTART, [*small, f"observe.dump={dump}", "observe.verify=roundtrip"]).run()
    assert len(list(dump.iterdir())) == 7
    for file in sorted(dump.iterdir()):
        again = harts.load(QUICKSTART, small).resume(load(file))
        assert again.digest() == whole.digest(), file.name


def test_training_resumes_from_a_plan_with_equal_loss(call, small, tmp_path):
    _, out, _ = call("run", QUICKSTART, *options(small), "--json", "--dump", tmp_path / "d")
    _, again, _ = call("run", QUICKSTART, *options(small), "--json", "--from", tmp_path / "d" / "05_layout.harts")
    assert json.loads(out)["train"][0]["loss"] == json.loads(again)["train"][0]["loss"]


def test_log_probs_of_one_microbatch_carry_a_graph(small):
    pipeline = harts.load(QUICKSTART, small)
    layouts = pipeline.plan()
    assert isinstance(layouts, PerMicrobatch)
    outputs = pipeline.logprobs(layouts.items[0])
    assert outputs.logprobs.requires_grad


def test_failing_training_saves_the_plan_and_says_how_to_rerun(call, small, tmp_path):
    code, out, err = call("run", QUICKSTART, *options(small), "--set", "model.vocab_size=3", "--dump", tmp_path / "d")
    assert (code, out) == (1, "")
    assert "outside the model's vocabulary of 3" in err
    words = shlex.split(err.rpartition("rerun it with: ")[2])
    assert words[:2] == ["harts", "run"]
    assert load(words[-1]).items[0].kind == "compact_layout"
    assert call(*words[1:])[0] == 1


def test_settings_that_do_not_fit_together_are_bad_config(call, small):
    code, _, err = call("check", QUICKSTART, *options(small), "--set", "layout.conv_width=3")
    assert code == 2
    assert "conv_width" in err


def test_batch_that_is_handed_over_is_planned(small):
    given = [each for each in small if not each.startswith("ingest")] + ["ingest={type: batch}"]
    batch = batch_of(random_trajectories(random.Random(7), chunk=16))
    pipeline = harts.load(QUICKSTART, given, scope="plan")
    assert pipeline.plan(batch).step.semantic_tokens == len(batch.tokens)
    with pytest.raises(ConfigError, match="takes a batch, and none is given"):
        pipeline.plan()


PUBLISHED = {
    "quickstart/rollouts_dense": (212_329, 51_123, 2_934, 4),
    "medium/tau_trial": (800_729, 545_727, 7_642, 3),
    "medium/tau_request": (7_621_208, 545_727, 7_642, 3),
    "medium/toolbench_leaf": (384_691, 68_804, 4_463, 5),
    "medium/swe_trial": (796_700, 789_370, 3_490, 2),
    "medium/swe_request": (7_588_776, 881_743, 38_873, 3),
    "medium/swe_step": (19_408_860, 3_383_438, 52_825, 4),
    "medium/swe_all": (122_944_916, 5_083_262, 289_136, 4),
    "medium/cc_request": (16_482_172, 861_167, 2_247, 4),
}
"""S, C, replay rows and rounds of each real set as one microbatch, of the README of the data."""

SETS = [pytest.param(name, marks=[pytest.mark.slow] if "swe_all" in name else []) for name in PUBLISHED]


@pytest.mark.parametrize("name", SETS)
def test_real_rollouts_have_the_published_sharing_rounds_and_replay(call, name):
    given = [f"ingest.path={shared_data() / name}.jsonl.gz", "partition.capacity=null", "partition.replicas=1"]
    code, out, err = call("plan", PIPELINES / "plan_only.yaml", *options(given), "--verify", "off", "--json")
    assert code == 0, err
    report = json.loads(out)
    found = (
        report["sharing"]["semantic_tokens"],
        report["sharing"]["compact_tokens"],
        report["rounds"]["replay_rows"],
        report["rounds"]["max"],
    )
    assert found == PUBLISHED[name]


def test_a_file_whose_model_the_trainer_has_is_checked_and_explained_without_it(call):
    path = PIPELINES / "trainer_huggingface.yaml"
    code, out, _ = call("explain", path)
    assert code == 0
    assert "model: huggingface" in out
    code, _, err = call("run", path, "--set", "ingest={type: jsonl, path: data/synthetic.jsonl.gz}")
    assert code == 2
    assert "hand a model to harts.load" in err
