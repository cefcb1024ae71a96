import pytest

from harts.errors import InputError
from harts.stages.ingest.records import rollout_batch
from tests.stages.ingest.files import record

PARENT = record("p", [10, 11, 12, 99])


def child(tokens, shared, parent="p", name="c"):
    return record(name, tokens, parent=parent, shared_length=shared)


def fault_of(*records):
    with pytest.raises(InputError) as caught:
        rollout_batch(records, "test")
    return str(caught.value)


def test_claim_that_holds_changes_nothing():
    plain = rollout_batch([record("c", [10, 11, 12, 99, 7]), PARENT], "test")
    for shared in (0, 3, 4):
        claimed = rollout_batch([child([10, 11, 12, 99, 7], shared), PARENT], "test")
        assert claimed.digest() == plain.digest()


def test_root_may_say_that_it_has_no_parent():
    assert rollout_batch([record("a", parent=None, shared_length=0)], "test").columns.names == ("a",)


def test_claim_that_fails_tells_the_first_differing_index_and_both_ids():
    text = fault_of(PARENT, child([10, 11, 5, 6], 4))
    assert text == (
        "test[1]: trajectory 'c': field shared_length: is 4, but token 2 is 5 here and 12 in its parent 'p': "
        "they share 2 tokens"
    )


def test_every_failing_claim_is_told():
    text = fault_of(PARENT, child([10, 1], 2), child([10, 11, 12, 99], 4, name="d"), child([3], 1, name="e"))
    assert [line[:7] for line in text.splitlines()] == ["test[1]", "test[3]"]


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (child([10, 11], 3), "field shared_length: is 3, the trajectory has 2 tokens and its parent 'p' 4"),
        (child([10], 1, parent="q"), "field parent: 'q' is the id of no trajectory read"),
        (child([10], 1, parent="c"), "field parent: 'c' is the trajectory itself"),
        (child([10], -1), "field shared_length: is -1, must be an integer of at least 0"),
        (record("c", parent="p"), "field shared_length: is missing, parent needs it"),
        (record("c", shared_length=2), "field parent: is missing, shared_length 2 needs it"),
    ],
)
def test_claim_that_cannot_hold(claim, words):
    assert fault_of(PARENT, claim) == f"test[1]: trajectory 'c': {words}"
