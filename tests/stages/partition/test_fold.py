"""What searches leave out, and put back."""

import numpy as np

from harts.stages.partition.fold import folded
from harts.stages.partition.labels import renumbered
from tests.forests import trie_of
from tests.stages.partition.naive import sorted_tokens, tries, works_of


def test_prefixes_and_duplicates_go_with_an_extension() -> None:
    for name, rng, trie in tries(range(20)):
        tokens = sorted_tokens(trie)
        found = folded(trie.index)
        maximal = {x for x in tokens if not any(len(y) > len(x) and y[: len(x)] == x for y in tokens)}
        kept = [tokens[i] for i in found.kept]
        assert sorted(kept) == sorted(maximal), name
        for x, group in zip(tokens, found.group.tolist(), strict=True):
            assert kept[group][: len(x)] == x, name
        small = trie_of(kept)
        assert found.lcps.length.tolist() == small.length.tolist(), name
        assert found.lcps.lcp.tolist() == small.lcp.tolist(), name
        label = renumbered(np.array([rng.randrange(3) for _ in kept]))
        whole = found.unfold(label)
        assert sorted(works_of(trie, whole)) == sorted(works_of(small, label)), name
        assert found.fold(whole).tolist() == label.tolist(), name


def test_any_partition_folds_to_one_that_is_no_heavier() -> None:
    for name, rng, trie in tries(range(20)):
        found = folded(trie.index)
        label = renumbered(np.array([rng.randrange(3) for _ in trie.order]))
        small = trie_of([sorted_tokens(trie)[i] for i in found.kept])
        before = works_of(trie, label)
        assert max(works_of(small, found.fold(label))) <= max(before), name
        assert sum(works_of(small, found.fold(label))) <= sum(before), name
