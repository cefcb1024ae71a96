"""Between the passes expanding backends hold compact rows alone; nothing else about the backward pass changes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from harts.backends.full import packed
from harts.backends.full.expand import expand
from harts.backends.full.made_again import Recipe, made_again
from harts.backends.plan_tensors import AttentionViews
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, Branches, views_of
from tests.backends.full.packed_fakes import SHAPES, Saving, draw

FORESTS: dict[str, Branches] = {"three levels": THREE_LEVELS, "flat": [(-1, 9), (-1, 2), (-1, 8)]}
KEYS = 33
"""Of the three levels; rows are 19."""
Shape = tuple[int, int, int, int]


class Wide(Saving):
    """A library of one head dim."""

    def _head_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        return 32, 32


class Split(Saving):
    """One key/value head a call."""

    def _groups_of_a_call(self, views: AttentionViews, group: int, width: int) -> int:
        return 1


class Copying(Saving):
    """A library that saves copies."""

    def _run(self, q, k, v, views, scale):
        return super()._run(q, k.clone(), v.clone(), views, scale)


KINDS = (Saving, Wide, Split, Copying)


@pytest.fixture(autouse=True)
def memory_does_not_wait_for_a_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@contextmanager
def all_is_saved() -> Iterator[None]:
    """Nothing is made again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "made_again", lambda *recipes: nullcontext())
        yield


@contextmanager
def watched(saved: list[Tensor]) -> Iterator[None]:
    """Lists what is saved."""

    def pack(x: Tensor) -> Tensor:
        saved.append(x.detach())
        return saved[-1]

    with saved_tensors_hooks(pack, lambda x: x):
        yield


def attend(kind: type[Saving], inputs: list[Tensor], padding: int = 0, branches: Branches = THREE_LEVELS) -> Tensor:
    return kind(StageConfig()).attend(*inputs, views_of(branches, padding), 0.37)


def upstream(out: Tensor) -> Tensor:
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.dtype)


def gradients(out: Tensor, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(out, [each for each in inputs if each.requires_grad], upstream(out), **options))


def same_bits(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", [Saving, Wide, Split])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_expanded_row_is_saved(kind: type[Saving], shape: Shape) -> None:
    saved: list[Tensor] = []
    inputs = draw(19, shape)
    with watched(saved):
        out = attend(kind, inputs)
    assert all(len(each) != KEYS for each in saved)
    calls = shape[1] if kind is Split else 1
    assert len(saved) == 6 * calls
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in saved}
    for x in inputs[1:]:
        assert memory.pop(x.untyped_storage().data_ptr()) == x.nbytes
    wide = 32 if kind is Wide else 0  # the library's queries and outputs
    offsets = 2 * 5 * 4 + (2 * 6 * 4 if calls > 1 else 0)
    assert sum(memory.values()) <= 19 * shape[0] * 8 * (max(wide, shape[2]) + max(wide, shape[3])) + offsets + 64
    assert gradients(out, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_are_those_of_a_pass_that_saves_all(
    kind: type[Saving], shape: Shape, branches: Branches, padding: int
) -> None:
    inputs = draw(19 + padding, shape)
    found = attend(kind, inputs, padding, branches)
    with all_is_saved():
        wanted = attend(kind, inputs, padding, branches)
    assert torch.equal(found, wanted)
    assert same_bits(gradients(found, inputs), gradients(wanted, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_bits_are_the_same_in_any_dtype(dtype: torch.dtype) -> None:
    inputs = draw(19, SHAPES["mla"], dtype)
    found = attend(Saving, inputs)
    with all_is_saved():
        wanted = attend(Saving, inputs)
    assert found.dtype == dtype
    assert same_bits([found, *gradients(found, inputs)], [wanted, *gradients(wanted, inputs)])


@pytest.mark.parametrize("fixed", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
def test_inputs_without_gradient(branches: Branches, fixed: tuple[int, ...]) -> None:
    inputs = draw(19, SHAPES["gqa"])
    for number in fixed:
        inputs[number].requires_grad_(False)
    out = attend(Saving, inputs, branches=branches)
    with all_is_saved():
        wanted = attend(Saving, inputs, branches=branches)
    assert torch.equal(out, wanted)
    assert out.requires_grad == (len(fixed) < 3)
    if out.requires_grad:
        assert same_bits(gradients(out, inputs), gradients(wanted, inputs))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_a_backward_pass_nothing_is_saved(context: Any) -> None:
    saved: list[Tensor] = []
    backend, inputs = Saving(StageConfig()), draw(19, SHAPES["gqa"])
    with watched(saved), context():
        out = backend.attend(*inputs, views_of(THREE_LEVELS), 0.37)
    assert not saved and not out.requires_grad
    assert backend.held() == [False, False]
    assert torch.equal(out, attend(Saving, inputs))


def memory_of(*tensors: Tensor) -> list[StorageWeakRef]:
    return [StorageWeakRef(each.untyped_storage()) for each in tensors]


@pytest.mark.parametrize("kind", [Saving, Wide])
@pytest.mark.parametrize(("context", "held"), [(nullcontext, False), (all_is_saved, True)])
def test_memory_is_freed_after_the_passes(kind: type[Saving], context: Any, held: bool) -> None:
    """Expanded rows after the forward pass, compact ones after the backward pass, while outputs live on."""
    backend, inputs = kind(StageConfig()), draw(19, SHAPES["gqa"])
    q, k, v = (each * 1 for each in inputs)
    with context():
        out = backend.attend(q, k, v, views_of(THREE_LEVELS), 0.37)
    compact = memory_of(k, v)
    del q, k, v
    assert backend.held() == [held, held]
    assert [each.expired() for each in compact] == [held, held]
    gradients(out, inputs)
    assert backend.held() == [False, False]
    assert all(each.expired() for each in compact)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_freed_where_no_backward_pass_follows(kind: type[Saving]) -> None:
    computed = [each * 1 for each in draw(19, SHAPES["gqa"])]
    out = attend(kind, computed)
    memory = memory_of(*computed, out)
    del computed, out
    assert all(each.expired() for each in memory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_may_be_kept_for_another_backward_pass(kind: type[Saving]) -> None:
    inputs = draw(19, SHAPES["gqa"])
    out = attend(kind, inputs)
    first = gradients(out, inputs, retain_graph=True)
    assert same_bits(gradients(out, inputs, retain_graph=True), first)
    assert same_bits(gradients(out, inputs), first)
    with pytest.raises(RuntimeError, match="a second time"):
        gradients(out, inputs)


@pytest.mark.parametrize("changed", range(3))
@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
@pytest.mark.parametrize("kind", [Saving, Wide, Split])
def test_a_change_in_place_between_the_passes_is_an_error(kind: type[Saving], branches: Branches, changed: int) -> None:
    if changed == 0 and kind is not Saving:
        pytest.skip("its queries are copies")
    inputs = draw(19, SHAPES["gqa"])
    computed = [each * 1 for each in inputs]
    out = attend(kind, computed, branches=branches)
    computed[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(out, inputs)


def test_a_change_of_the_output_in_place_is_an_error() -> None:
    inputs = draw(19, SHAPES["gqa"])
    out = attend(Saving, inputs).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(out, inputs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_holds_nothing_and_gives_the_same_bits(kind: type[Saving], reentrant: bool) -> None:
    inputs, inner = draw(19, SHAPES["gqa"]), []

    def layer(*given: Tensor) -> Tensor:
        q, k, v = (each * 2 for each in given)
        out = attend(kind, [q, k, v])
        inner.extend(memory_of(q, k, v, out))
        return out * 3

    wanted = layer(*inputs)
    assert not all(each.expired() for each in inner)
    inner.clear()
    found = checkpoint(layer, *inputs, use_reentrant=reentrant)
    assert all(each.expired() for each in inner)
    assert torch.equal(found, wanted)
    wanted_gradients = gradients(wanted, inputs)
    found.backward(upstream(found))
    assert same_bits([each.grad for each in inputs], wanted_gradients)


def test_a_checkpointed_graph_may_be_kept() -> None:
    inputs = draw(19, SHAPES["gqa"])
    found = checkpoint(lambda *given: attend(Saving, list(given)), *inputs, use_reentrant=False)
    first = gradients(found, inputs, retain_graph=True)
    assert same_bits(gradients(found, inputs), first)
    assert same_bits(first, gradients(attend(Saving, inputs), inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_may_be_nested(kind: type[Saving]) -> None:
    inputs = draw(19, SHAPES["gqa"])

    def inner(*given: Tensor) -> Tensor:
        return attend(kind, [each * 2 for each in given])

    def outer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = checkpoint(inner, q, k, v, use_reentrant=False)
        return checkpoint(inner, q.sin(), k, v, use_reentrant=False)

    wanted = inner(inner(*inputs).sin(), *inputs[1:])
    found = checkpoint(outer, *inputs, use_reentrant=False)
    assert torch.equal(found, wanted)
    assert same_bits(gradients(found, inputs), gradients(wanted, inputs))


def test_hooks_around_a_layer_get_all_that_is_saved() -> None:
    inputs = draw(19, SHAPES["gqa"])
    wanted = gradients(attend(Saving, inputs), inputs)
    with saved_tensors_hooks(torch.clone, torch.clone):
        out = attend(Saving, inputs)
    with torch.no_grad():  # of what was moved away, no change is seen
        for each in (*inputs, out):
            each.zero_()
    assert same_bits(gradients(out, inputs), wanted)


class Square(torch.autograd.Function):
    """Saves its input, a view of it, and a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x[1:], x.clone())
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, part, copy = ctx.saved_tensors
        assert torch.equal(x[1:], part) and torch.equal(x, copy)
        return 2 * x * grads[0]


def test_what_is_not_recognised_is_saved_as_it_is() -> None:
    views, makes = views_of(THREE_LEVELS), []

    def make(x: Tensor) -> Tensor:
        makes.append(torch.is_grad_enabled())
        return expand(x, views)

    x = draw(19, SHAPES["gqa"])[1]
    made, saved = expand(x, views), []
    with watched(saved), made_again(Recipe(made, x, make)):
        squares = Square.apply(made)
    assert [len(each) for each in saved] == [19, KEYS - 1, KEYS]
    (found,) = torch.autograd.grad(squares.sum(), x)
    (wanted,) = torch.autograd.grad(expand(x, views).square().sum(), x)
    assert torch.equal(found, wanted)
    assert makes == [False]


def test_an_error_of_the_library_leaves_no_hooks_behind() -> None:
    x, saved = torch.ones(3, requires_grad=True), []
    with watched(saved):
        with pytest.raises(ArithmeticError), made_again(Recipe(x, torch.zeros(3), torch.clone)):
            raise ArithmeticError
        square = Square.apply(x)
    assert saved[0].data_ptr() == x.data_ptr()
    assert torch.equal(torch.autograd.grad(square.sum(), x)[0], 2 * torch.ones(3))
