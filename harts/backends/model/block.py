"""One layer of the reference model, and the stack of them."""

from __future__ import annotations

from torch import Tensor, nn

from harts.backends.base import FullAttention, LinearAttention
from harts.backends.model.attention_layer import GqaLayer, MlaLayer
from harts.backends.model.config import ReferenceConfig
from harts.backends.model.linear_layer import LinearLayer
from harts.backends.model.mlp import Mlp
from harts.backends.model.moe import MoeLayer, RouterStatistics
from harts.backends.model.norm import RmsNorm
from harts.backends.model.parameters import Embedding, Projection
from harts.backends.plan_tensors import PlanTensors


class Block(nn.Module):
    """Pre-norm residual layer: token mixer, then MLP or experts."""

    def __init__(self, config: ReferenceConfig, index: int, linear: LinearAttention, full: FullAttention) -> None:
        super().__init__()
        hidden, dtype = config.hidden_size, config.torch_dtype
        self.mixer_norm, self.mlp_norm = RmsNorm(hidden, dtype), RmsNorm(hidden, dtype)
        self.mixer: nn.Module
        if config.kinds[index] == "K":
            self.mixer = LinearLayer(config, linear)
        else:
            self.mixer = (GqaLayer if config.attention == "gqa" else MlaLayer)(config, full)
        moe = config.moe
        self.mlp = Mlp(hidden, config.intermediate_size, dtype) if moe is None or index < moe.dense_layers else None
        self.moe = MoeLayer(config, moe) if moe is not None and self.mlp is None else None

    def forward(self, x: Tensor, plan: PlanTensors) -> tuple[Tensor, RouterStatistics | None]:
        """[R, hidden] to [R, hidden], and the router's statistics if the layer has experts."""
        x = x + self.mixer(self.mixer_norm(x), plan)
        normed = self.mlp_norm(x)
        if self.mlp is not None:
            return x + self.mlp(normed), None
        assert self.moe is not None
        out, found = self.moe(normed, plan.multiplicity)
        return x + out, found


class Hybrid(nn.Module):
    """All parameters of the reference model; embedding and LM head are not tied."""

    def __init__(self, config: ReferenceConfig, linear: LinearAttention, full: FullAttention) -> None:
        super().__init__()
        hidden, dtype = config.hidden_size, config.torch_dtype
        self.embedding = Embedding(config.vocab_size, hidden, dtype)
        self.blocks = nn.ModuleList(Block(config, index, linear, full) for index in range(config.layers))
        self.norm = RmsNorm(hidden, dtype)
        self.head = Projection(hidden, config.vocab_size, dtype)

    @property
    def moe_layers(self) -> list[MoeLayer]:
        """Layers with experts, in order."""
        return [each for each in self.modules() if isinstance(each, MoeLayer)]
