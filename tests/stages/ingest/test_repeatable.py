"""The same records give the same trie: in any order, in any process."""

import os
import random
import subprocess
import sys

import numpy as np

from harts.stages.ingest.records import rollout_batch
from harts.stages.ingest.trie import build_trie
from tests.forests import random_trajectories
from tests.stages.ingest.files import record, write

SCRIPT = """
import sys
from pathlib import Path
from harts.stages.ingest.jsonl import Jsonl
config = Jsonl.Config(path=Path(sys.argv[1]), shared_trained_token="once", group_advantage="normalized")
print(Jsonl(config).run(None).digest(), hash("groups"))
"""


def records(seed: int):
    rng = random.Random(seed)
    paths = random_trajectories(rng, 8, roots=3, forks=5)
    return [record(f"t{i}", path, group=f"g{i % 4}", reward=rng.random()) for i, path in enumerate(paths)]


def test_permuted_records_give_the_same_sorted_tokens():
    for seed in range(50):
        made = records(seed)
        trie = build_trie(rollout_batch(made, "test"))
        random.Random(seed).shuffle(made)
        other = build_trie(rollout_batch(made, "test"))
        np.testing.assert_array_equal(trie.lcp, other.lcp)
        for a, b in zip(trie.order, other.order, strict=True):
            one, two = (
                each.batch.tokens[each.batch.columns.offset[i] : each.batch.columns.offset[i + 1]]
                for each, i in ((trie, a), (other, b))
            )
            np.testing.assert_array_equal(one, two)


def test_hash_seed_has_no_effect(tmp_path):
    path = write(tmp_path / "small.jsonl", records(0))
    found = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SCRIPT, str(path)]
        run = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        found.append(run.stdout.decode().split())
    assert found[0][1] != found[1][1]  # the seeds do differ
    assert found[0][0] == found[1][0]
