"""What holds for every backend alike, at the entry of every layer."""

from __future__ import annotations

import pytest
import torch

from harts.backends.base import FullAttention
from harts.backends.full.sdpa import Sdpa
from harts.backends.full.tree.backend import Tree
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, views_of
from tests.backends.full.packed_fakes import fake

PADDING = 2
ROWS = 19 + PADDING


@pytest.mark.parametrize("rows", [19, ROWS + 5], ids=["no padding", "too many"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", [Sdpa(StageConfig()), fake(), Tree(StageConfig())], ids=lambda x: type(x).__name__)
def test_another_number_of_rows_is_refused_by_name(backend: FullAttention, name: str, rows: int) -> None:
    given = {each: torch.zeros(rows if each == name else ROWS, 2, 8) for each in ("q", "k", "v")}
    with pytest.raises(ValueError, match=f"^{name}: has {rows} rows, the views have {ROWS}$"):
        backend.attend(**given, views=views_of(THREE_LEVELS, PADDING), scale=1.0)
