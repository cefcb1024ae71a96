import pytest

from harts.errors import InputError
from harts.stages.ingest.records import rollout_batch
from tests.stages.ingest.files import record


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("old_log_probs", "old_logprobs"),
        ("old_logprob", "old_logprobs"),
        ("refLogprobs", "ref_logprobs"),
        ("loss_masks", "loss_mask"),
        ("advantagse", "advantage"),
        ("Reward", "reward"),
        ("shared_lenght", "shared_length"),
        ("temprature", "temperature"),
    ],
)
def test_slip_is_refused_with_the_name_it_was_meant_to_be(field, meant):
    with pytest.raises(InputError, match=rf"trajectory 'a': field {field}: is unknown; did you mean {meant}s?\?$"):
        rollout_batch([record("a") | {field: [0.0] * 3}], "test")


@pytest.mark.parametrize("field", ["group_id", "token_ids", "n_tokens", "turn", "model", "parent_id", "text", "x", ""])
def test_other_fields_are_metadata(field):
    plain = rollout_batch([record("a")], "test")
    assert rollout_batch([record("a") | {field: {"any": ["thing"]}}], "test").digest() == plain.digest()


def test_metadata_of_both_forms_is_known():
    fields = {"turn_boundaries": [0], "roles": "u", "keep": 0, "tb": []}
    assert rollout_batch([record("a", **fields)], "test").columns.names == ("a",)


@pytest.mark.parametrize("field", ["lcp", "suffix", "loss_spans"])
def test_front_coded_field_needs_its_header(field):
    with pytest.raises(InputError, match=f"field {field}: belongs to the front-coded form"):
        rollout_batch([record("a", **{field: 0})], "test")
