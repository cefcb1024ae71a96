"""Where a model comes from, and every way to ask for one that there is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.huggingface.config import HuggingFaceConfig
from harts.backends.model.huggingface.families.bailing_hybrid import shapes
from harts.backends.model.huggingface.family import family_named, family_of
from harts.errors import BackendError, ConfigError
from harts.registry import BUILT_IN, names, resolve
from tests.backends.model.huggingface.models import CHUNK, FAMILIES, OVERRIDES, config, handed_over, tiny, wrapped
from tests.backends.model.huggingface.runs import compact, forest, relative
from tests.parity.trees import layout_of


def test_is_registered_with_every_family() -> None:
    assert resolve("models", "huggingface") is HuggingFace
    assert sorted(names("huggingface_families")) == sorted(BUILT_IN["huggingface_families"]) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_read_with_all_its_weights(family: str, tmp_path: Path) -> None:
    made = tiny(family)
    made.module.save_pretrained(tmp_path)
    read = wrapped(HuggingFaceConfig(path=str(tmp_path)))
    assert read.family is made.family
    assert read.need(CHUNK) == made.need(CHUNK)
    layout = layout_of(forest(0), CHUNK)
    weights = read.module.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in made.module.state_dict().items())
    with torch.no_grad():  # the same weights at other places in memory may round differently
        wanted, got = (torch.cat(compact(each, layout).logits) for each in (made, read))
    assert relative(got, wanted) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_all_weights_is_refused(family: str, tmp_path: Path) -> None:
    module = tiny(family).module
    held = {
        name: each for name, each in module.state_dict().items() if not name.endswith("layers.1.mlp.up_proj.weight")
    }
    held.pop("model.norm.weight")
    module.save_pretrained(tmp_path, state_dict=held)
    with pytest.raises(ConfigError, match=r"lacks [12] of the model's weights: .*model.norm.weight"):
        wrapped(HuggingFaceConfig(path=str(tmp_path)))


def test_the_text_model_of_a_checkpoint_with_images_is_read(tmp_path: Path) -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 16}
    settings = Qwen3_5Config(text_config=OVERRIDES["qwen3_5"], vision_config=sizes | {"out_hidden_size": 32})
    whole = Qwen3_5ForConditionalGeneration(settings)
    whole.save_pretrained(tmp_path)
    read = wrapped(HuggingFaceConfig(path=str(tmp_path)))
    assert read.family is family_named("qwen3_5")
    weights = whole.state_dict()
    for name, each in read.module.state_dict().items():
        assert torch.equal(each, weights[name.replace("model.", "model.language_model.", 1)]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_depend_on_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = wrapped(config(family)).module.state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    second = wrapped(config(family)).module.state_dict()
    other = wrapped(config(family, seed=1)).module.state_dict()
    assert all(torch.equal(each, second[name]) for name, each in first.items())
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_need_is_known_without_building(family: str, tmp_path: Path) -> None:
    settings = config(family)
    made = wrapped(settings)
    need = HuggingFace.need_of(settings, 16, "cpu")
    assert need == made.need(16)
    assert need is not None and need.chunk_size == 16 and need.dtype == torch.float32
    made.module.save_pretrained(tmp_path)
    assert HuggingFace.need_of(HuggingFaceConfig(path=str(tmp_path)), 16, "cpu") == need
    assert Naive(Naive.Config()).why_not(need) == Sdpa(Sdpa.Config()).why_not(need) == []


def test_need_states_what_the_layers_use() -> None:
    linear = {"bailing_hybrid": (4, 4, 8, 8), "qwen3_next": (2, 4, 8, 6)}
    full = {"bailing_hybrid": (4, 4, 12, 6), "qwen3_next": (4, 2, 8, 8), "olmo_hybrid": (4, 2, 8, 8)}
    for family in ("bailing_hybrid", "qwen3_next"):
        need = wrapped(config(family)).need(CHUNK)
        assert (*need.linear_heads, *need.linear_head_dims) == linear[family]
        assert need.conv_width == 4
    for family, wanted in full.items():
        need = wrapped(config(family)).need(CHUNK)
        assert (*need.full_heads, *need.full_head_dims) == wanted


def test_bounded_gates_are_told() -> None:
    cls = family_named("bailing_hybrid").config_class
    assert shapes(cls(**OVERRIDES["bailing_hybrid"], kda_lower_bound=-3.0)).least_gate == -3.0
    assert shapes(cls(**OVERRIDES["bailing_hybrid"], kda_safe_gate=False)).least_gate == float("-inf")


def test_unbounded_gates_of_a_family_that_can_bound_them_run() -> None:
    paths = forest(2)
    model = tiny("bailing_hybrid", {"kda_safe_gate": False})
    assert model.need(CHUNK).least_gate == float("-inf")
    assert compact(model, layout_of(paths, CHUNK)).loss.isfinite()


def test_nothing_is_needed_before_the_trainers_model_is_there() -> None:
    assert HuggingFace.need_of(HuggingFaceConfig(), CHUNK, "cpu") is None
    with pytest.raises(ConfigError, match=r"give path, family, or hand a model to harts.load"):
        wrapped(HuggingFaceConfig())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_activations_have_the_models_dtype(dtype: str) -> None:
    model = tiny("bailing_hybrid", dtype=dtype)
    wanted = getattr(torch, dtype)
    assert model.need(CHUNK).dtype == wanted
    found = compact(model, layout_of(forest(0), CHUNK))
    assert {each.dtype for each in found.logits} == {wanted}
    assert found.z is not None and found.z.dtype == (torch.float64 if dtype == "float64" else torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close_to_float32(family: str) -> None:
    layout = layout_of(forest(0), CHUNK)
    with torch.no_grad():
        exact, rough = (torch.cat(compact(tiny(family, dtype=x), layout).logits) for x in ("float32", "bfloat16"))
    cosine = torch.cosine_similarity(exact, rough.float(), dim=1)
    assert float(cosine.median()) > 0.99


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "here", "family": "qwen3_5"}, "give path, a checkpoint, or family, for random weights, and not both"),
        ({"path": "here", "overrides": {"hidden_size": 8}}, "overrides are for random weights of a family"),
        ({"overrides": {"hidden_size": 8}}, "overrides are for random weights of a family"),
        ({"family": "qwen3_5", "dtype": "float64"}, "experts: grouped_mm has no float64; set experts: eager"),
        ({"family": "qwen3_5", "dtype": "float16"}, "dtype"),
        ({"family": "qwen3_5", "recompute": True}, "recompute"),
        ({"familly": "qwen3_5"}, "familly"),
    ],
)
def test_wrong_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HuggingFaceConfig(**fields)


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'qwen3_nxt' is not registered; did you mean qwen3_next\?"):
        wrapped(HuggingFaceConfig(family="qwen3_nxt"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 8, "layers": 2}, "Qwen3_5TextConfig has no hiden_size, layers"),
        ({"hidden_size": "8"}, "Qwen3_5TextConfig: .*'hidden_size' expected int, got str"),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention", "nothing"]}, "Qwen3_5TextConfig: .*nothing"),
    ],
)
def test_wrong_overrides_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(HuggingFaceConfig(family="qwen3_5", overrides=overrides))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        wrapped(HuggingFaceConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        ConfigError, match=r"no family has model_type 'gpt2'; registered are bailing_hybrid, kimi_linear"
    ):
        wrapped(HuggingFaceConfig(path=str(tmp_path)))


def test_every_model_type_belongs_to_one_family() -> None:
    kinds = [(kind, name) for name in FAMILIES for kind in family_named(name).model_types]
    assert len({kind for kind, _ in kinds}) == len(kinds)
    for kind, name in kinds:
        assert family_of(kind) is family_named(name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"family": "qwen3_5"}, "family"),
        ({"family": "qwen3_5", "overrides": {"hidden_size": 8}}, "family, overrides"),
        ({"path": "here", "seed": 0}, "path, seed"),
        ({"experts": "grouped_mm", "dtype": "float32"}, "dtype, experts"),
    ],
)
def test_a_module_beside_fields_that_make_another_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BackendError, match=f"a model is handed over, and {named} would make another one"):
        handed_over(tiny("qwen3_5").module, **fields)
    assert handed_over(tiny("qwen3_5").module, path=None, family=None, overrides={}).module


def test_a_module_without_a_head_is_refused() -> None:
    with pytest.raises(BackendError, match="is a Qwen3_5TextModel, needed is a Qwen3_5ForCausalLM"):
        handed_over(tiny("qwen3_5").module.model)


def test_a_module_of_no_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="no family has model_type 'None'"):
        handed_over(torch.nn.Linear(2, 2))
