"""The ingest stage `arrays`: the same batch as from records, by the same rules, and what the files must be."""

import random
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from harts.errors import InputError
from harts.ir import CompactTrie
from harts.ir.runs import offsets
from harts.stages.ingest.arrays import Arrays, read_arrays
from harts.stages.ingest.handed_over import HandedOver
from harts.stages.ingest.records import rollout_batch
from tests.forests import random_trajectories
from tests.stages.ingest.files import record

NAN, INF = float("nan"), float("inf")


def step(**fields) -> dict[str, np.ndarray]:
    """Two trajectories of 3 and 2 tokens, every token but the first trained; keywords replace, add or (None) drop."""
    made = {
        "tokens": np.array([1, 2, 3, 1, 5], dtype=np.int32),
        "offset": np.array([0, 3, 5]),
        "loss_mask": np.array([0, 1, 1, 0, 1], dtype=np.bool_),
        "ids": np.array(["a", "b"]),
    }
    return {name: array for name, array in (made | fields).items() if array is not None}


def folder(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    path.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


def archive(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def from_path(path: Path, **config) -> CompactTrie:
    return Arrays(Arrays.Config(path=path, **config)).run(None)


def faults_of(path: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        from_path(path)
    return [text.removeprefix(f"{path}: ") for text in str(caught.value).splitlines()]


def test_edge():
    assert Arrays.edge == (type(None), CompactTrie)


@pytest.mark.parametrize("write", [folder, archive])
@pytest.mark.parametrize("mask_dtype", [np.bool_, np.uint8])
def test_same_trie_as_from_records(tmp_path, write, mask_dtype):
    rng = random.Random(7)
    for round_ in range(20):
        paths = random_trajectories(rng, 8, forks=rng.randint(0, 6))
        records = [
            record(
                f"n{i}",
                path,
                group=str(rng.randrange(3)),
                reward=rng.random(),
                old_logprobs=[-rng.random()] * len(path),
            )
            for i, path in enumerate(paths)
        ]
        made = write(
            tmp_path / f"step{round_}",
            {
                "tokens": np.concatenate(paths).astype(np.int32),
                "offset": offsets(np.array([len(path) for path in paths])),
                "loss_mask": np.concatenate([each["loss_mask"] for each in records]).astype(mask_dtype),
                "ids": np.array([each["id"] for each in records]),
                "groups": np.array([int(each["group"]) for each in records], dtype=np.int16),
                "reward": np.array([each["reward"] for each in records]),
                "old_logprobs": np.concatenate([each["old_logprobs"] for each in records]),
            },
        )
        options = {"shared_trained_token": "once", "group_advantage": "normalized"}
        expected = HandedOver(HandedOver.Config(**options)).run(rollout_batch(records, str(made)))
        found = from_path(made, **options)
        found.verify()
        assert found.digest() == expected.digest()


def test_names_and_groups_may_be_absent(tmp_path):
    columns = read_arrays(folder(tmp_path / "step", step(ids=None))).columns
    assert columns.names == ("t0", "t1")
    assert columns.groups == ("all",) and columns.group.tolist() == [0, 0]


def test_groups_are_numbered_as_they_come(tmp_path):
    fields = {
        "tokens": np.arange(4, dtype=np.int32),
        "offset": np.arange(5),
        "loss_mask": np.zeros(4, dtype=np.bool_),
        "ids": None,
        "groups": np.array(["y", "x", "y", "z"]),
    }
    columns = read_arrays(folder(tmp_path / "step", step(**fields))).columns
    assert columns.groups == ("y", "x", "z") and columns.group.tolist() == [0, 1, 0, 2]


def test_files_of_a_folder_are_mapped_not_read(tmp_path):
    size = 1_000_000
    fields = {
        "tokens": np.repeat(np.arange(100, dtype=np.int32), size // 100),
        "offset": np.arange(0, size + 1, size // 100),
        "loss_mask": np.ones(size, dtype=np.bool_),
        "ids": None,
        "advantages": np.ones(size),
    }
    path = folder(tmp_path / "step", step(**fields))
    from_path(path)  # compiles
    tracemalloc.start()
    trie = from_path(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trie.semantic_tokens == size
    assert kept < 100_000 and peak < 400_000  # a copy of any column would be a million bytes or more


@pytest.mark.parametrize("write", [folder, archive])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": None}, "field tokens: is missing"),
        ({"offset": None}, "field offset: is missing"),
        ({"loss_mask": None}, "field loss_mask: is missing"),
        ({"tokens": np.arange(5)}, "field tokens: has dtype int64, must be int32"),
        ({"tokens": np.arange(5, dtype=">i4")}, "field tokens: has dtype >i4, must be int32"),
        (
            {"tokens": np.zeros((5, 1), dtype=np.int32)},
            "field tokens: is an array of shape (5, 1), must have 1 dimension",
        ),
        ({"tokens": np.int32(5)}, "field tokens: is an array of shape (), must have 1 dimension"),
        ({"offset": np.array([0, 3, 5], dtype=np.int32)}, "field offset: has dtype int32, must be int64"),
        ({"loss_mask": np.ones(5)}, "field loss_mask: has dtype float64, must be bool or uint8"),
        ({"loss_mask": np.ones(5, dtype=np.int8)}, "field loss_mask: has dtype int8, must be bool or uint8"),
        ({"reward": np.ones(2, dtype=np.float32)}, "field reward: has dtype float32, must be float64"),
        ({"advantages": np.ones(5, dtype=np.float16)}, "field advantages: has dtype float16, must be float64"),
        ({"ids": np.array([b"a", b"b"])}, "field ids: has dtype |S1, must be text (str)"),
        ({"groups": np.array([0.0, 1.0])}, "field groups: has dtype float64, must be text (str) or an integer type"),
        ({"offset": np.array([1, 3, 5])}, "field offset: entry 0 is 1, must be 0"),
        ({"offset": np.array([0, 3, 6])}, "field offset: entry 2 is 6, must be 5, the number of tokens"),
        ({"offset": np.array([0, 3, 4])}, "field offset: entry 2 is 4, must be 5, the number of tokens"),
        ({"loss_mask": np.ones(4, dtype=np.bool_)}, "field loss_mask: has 4 entries, expected 5, one for each token"),
        ({"weights": np.ones(6)}, "field weights: has 6 entries, expected 5, one for each token"),
        ({"weight": np.ones(5)}, "field weight: has 5 entries, expected 2, one for each trajectory"),
        ({"ids": np.array(["a"])}, "field ids: has 1 entries, expected 2, one for each trajectory"),
        ({"groups": np.arange(3)}, "field groups: has 3 entries, expected 2, one for each trajectory"),
        ({"ids": np.array(["a", ""])}, "field ids: entry 1 is '', must be text that is not empty"),
        ({"ids": np.array(["\ud800", "b"])}, "field ids: entry 0 is '\\ud800', which holds a lone surrogate"),
        ({"ids": np.array(["a", "a"])}, "field ids: entry 1 is 'a', which is taken by entry 0"),
        ({"groups": np.array(["", "g"])}, "field groups: entry 0 is '', must be text that is not empty"),
        (
            {"offset": np.array([0, 5, 5])},
            "trajectory 'b': field offset: goes from 5 to 5, a trajectory must have at least",
        ),
        ({"offset": np.array([0, 9, 5])}, "trajectory 'b': field offset: goes from 9 to 5"),
        ({"offset": np.array([0, -2, 5])}, "trajectory 'a': field offset: goes from 0 to -2"),
        (
            {"tokens": np.array([1, 2, 3, 4, -7], dtype=np.int32)},
            "trajectory 'b': field tokens: entry 1 is -7, a token id",
        ),
        (
            {"loss_mask": np.array([0, 1, 1, 0, 2], dtype=np.uint8)},
            "trajectory 'b': field loss_mask: entry 1 is 2, must",
        ),
        (
            {"loss_mask": np.array([0, 3, 1, 0, 1], dtype=np.uint8).view(np.bool_)},
            "trajectory 'a': field loss_mask: entry 1",
        ),
        ({"advantages": np.array([0, 0, 0, NAN, INF])}, "trajectory 'b': field advantages: entry 1 is inf, a trained"),
        (
            {"old_logprobs": np.array([0, -INF, 0, 0, 0])},
            "trajectory 'a': field old_logprobs: entry 1 is -inf, a trained",
        ),
        (
            {"reward": np.array([0.0, INF])},
            "trajectory 'b': field reward: is inf, must be finite: 1 tokens are trained",
        ),
        (
            {"temperature": np.array([0.0, 1.0])},
            "trajectory 'a': field temperature: is 0.0, must be positive and finite",
        ),
        (
            {"temperatures": np.array([0, 1, 1, 0, -1.0])},
            "trajectory 'b': field temperatures: entry 1 is -1.0, temperatures",
        ),
        ({"weight": np.ones(2), "weights": np.ones(5)}, "trajectory 'a': field weight: excludes weights"),
        ({"old_log_probs": np.ones(5)}, "field old_log_probs: is unknown; did you mean old_logprobs?"),
        ({"group": np.arange(2)}, "field group: is unknown; did you mean groups?"),
        ({"reward_known": np.ones(2, dtype=np.bool_)}, "field reward_known: is not read from arrays"),
    ],
)
def test_fault_names_file_trajectory_field_and_numbers(tmp_path, write, fields, words):
    (text,) = faults_of(write(tmp_path / "step", step(**fields)))
    assert text.startswith(words)


def test_faults_are_told_at_once(tmp_path):
    fields = {"tokens": np.arange(5), "offset": None, "offsets": np.array([0, 3, 5]), "reward": np.ones(2, dtype=int)}
    texts = faults_of(folder(tmp_path / "kinds", step(**fields)))
    assert [re.match(r"field (\w+): ", text)[1] for text in texts] == ["offsets", "tokens", "offset", "reward"]
    texts = faults_of(folder(tmp_path / "sizes", step(offset=np.array([1, 3, 4]), weights=np.ones(1))))
    assert len(texts) == 3
    rows = {
        "tokens": np.array([1, 2, 3, -1, 5], dtype=np.int32),
        "loss_mask": np.array([0, 1, 1, 0, 9], dtype=np.uint8),
    }
    texts = faults_of(folder(tmp_path / "rows", step(**rows)))
    assert [text[:32] for text in texts] == ["trajectory 'b': field tokens: en", "trajectory 'b': field loss_mask:"]


def test_values_that_are_never_read_may_be_anything(tmp_path):
    fields = {
        "reward": np.array([NAN, 1.0]),
        "advantages": np.array([NAN, 0, 0, INF, 0]),
        "temperatures": np.array([0.0, 1, 1, -1, 1]),
        "turn": np.arange(3, dtype=np.float16),
    }
    columns = read_arrays(folder(tmp_path / "step", step(**fields))).columns
    np.testing.assert_array_equal(columns.reward, fields["reward"])
    np.testing.assert_array_equal(columns.advantages, fields["advantages"])


def test_step_without_trajectories_is_refused(tmp_path):
    empty = {"tokens": np.zeros(0, dtype=np.int32), "loss_mask": np.zeros(0, dtype=np.bool_), "ids": None}
    for number, offset in enumerate((np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))):
        path = folder(tmp_path / f"step{number}", step(offset=offset, **empty))
        assert faults_of(path) == ["holds 0 trajectories, a step needs at least 1"]


def test_path_that_is_neither_a_folder_nor_an_archive(tmp_path):
    (text,) = faults_of(tmp_path / "nowhere.npz")
    assert text.startswith("cannot be read: ")
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert faults_of(tmp_path / "one.npy") == ["is one array, must be a folder of .npy files or an .npz"]
    (tmp_path / "text.npz").write_text("tokens")
    (text,) = faults_of(tmp_path / "text.npz")
    assert text.startswith("cannot be read: ")
    (tmp_path / "empty").mkdir()
    assert [text[-10:] for text in faults_of(tmp_path / "empty")] == ["is missing"] * 3


@pytest.mark.parametrize("damage", ["cut", "header", "pickled", "empty"])
def test_damaged_file_is_named(tmp_path, damage):
    path = folder(tmp_path / "step", step())
    file = path / "loss_mask.npy"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-2])
    elif damage == "header":
        file.write_bytes(b"not numpy" * 30)
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        np.save(file, np.array([None, {}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"loss_mask\.npy: cannot be read: "):
        read_arrays(path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "pickled"])
def test_damaged_archive_is_named(tmp_path, damage):
    path = archive(tmp_path / "step", step(ids=np.array([None, {}], dtype=object)) if damage == "pickled" else step())
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    if damage == "flipped":
        path.write_bytes(whole[:60] + bytes(byte ^ 255 for byte in whole[60:90]) + whole[90:])
    with pytest.raises(InputError, match=r"step\.npz: cannot be read: "):
        read_arrays(path)


def test_options_are_those_of_every_ingest_stage(tmp_path):
    path = folder(tmp_path / "step", step(reward=np.array([1.0, 0.0])))
    assert from_path(path, group_advantage="centered").batch.columns.advantage.tolist() == [0.5, -0.5]
    with pytest.raises(InputError, match="trajectory 'a': field tokens: has 3 entries, max_length is 2"):
        from_path(path, max_length=2)


def test_example_of_the_readme_writes_a_step(tmp_path, monkeypatch):
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    (example,) = re.findall(r"```py\n(.*?)```", readme, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("step").mkdir()
    scope = {"np": np, "paths": [[1, 2, 3], [1, 5]], "masks": [[0, 1, 1], [0, 1]], "prompts": ["x", "y"]}
    exec(example, scope)
    batch = read_arrays(Path("step"))
    assert batch.tokens.tolist() == [1, 2, 3, 1, 5] and batch.columns.offset.tolist() == [0, 3, 5]
    assert batch.columns.groups == ("x", "y")
