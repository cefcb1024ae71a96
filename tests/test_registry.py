"""Names: built in, registered, from installed packages, unknown, taken twice, broken."""

import sys

import pytest

from harts import registry
from harts.backends.model.huggingface.family import Family
from harts.errors import ConfigError


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.setattr(registry, "_added", {})


def install(monkeypatch, folder, package, entry_points, source="class Mine: pass\n"):
    """A package as pip leaves it: a module and a dist-info folder on sys.path."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize("kind", registry.BUILT_IN)
def test_every_built_in_name_resolves(kind):
    for name, (target, package) in registry.names(kind).items():
        assert package == "harts", (name, target)
        wanted = Family if kind == "huggingface_families" else type
        assert isinstance(registry.resolve(kind, name), wanted)


def test_installed_package_adds_a_stage_a_backend_and_a_work_model(monkeypatch, tmp_path):
    kinds = ("stages.layout", "linear_attention", "work_models")
    points = "".join(f"[harts.{kind}]\nmine = plug_in:Mine\n" for kind in kinds)
    install(monkeypatch, tmp_path, "plug-in", points)
    for kind in ("layout", "linear_attention", "work_models"):
        assert registry.names(kind)["mine"] == ("plug_in:Mine", "plug-in")
        assert registry.resolve(kind, "mine").__name__ == "Mine"


def test_installed_package_is_not_imported_until_it_is_named(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "loud", "[harts.stages.layout]\nloud = loud:Mine\n", "raise RuntimeError\n")
    assert "loud" in registry.names("layout")


def test_name_of_two_packages_names_both(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "rival", "[harts.stages.call_plan]\nmin_call = rival:Mine\n")
    with pytest.raises(ConfigError, match="call_plan: the name 'min_call' is registered by both harts and rival"):
        registry.resolve("call_plan", "min_call")


def test_registering_a_taken_name_names_both():
    registry.register("layout", "mine", "a:B", "first")
    with pytest.raises(ConfigError, match="layout: the name 'mine' is registered by both first and second"):
        registry.register("layout", "mine", "c:D", "second")


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean min_call\?.* known: .*min_call") as caught:
        registry.resolve("call_plan", "mincall")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("target", ["no_such_module:X", "harts.errors:NoSuchClass"])
def test_target_that_cannot_be_imported_says_whose_it_is(target):
    registry.register("models", "broken", target, "acme")
    with pytest.raises(ConfigError, match="models: 'broken' of acme cannot be imported: "):
        registry.resolve("models", "broken")
