"""Define a small GPT explicitly: embeddings, blocks of causal attention and MLP, and a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model."""

    layers: int
    heads: int
    width: int
    block_size: int
    vocabulary: int = 97
    dropout: float = 0.1


SIZES = {
    "tiny": GPTConfig(layers=2, heads=4, width=64, block_size=64),  # 0.1 million parameters
    "small": GPTConfig(layers=6, heads=8, width=256, block_size=128),  # 5 million
    "medium": GPTConfig(layers=12, heads=12, width=768, block_size=256),  # 85 million
    "large": GPTConfig(layers=28, heads=16, width=1024, block_size=512),  # 350 million
}


class GPT(nn.Module):
    """Predicts each next character, and returns the mean loss for the targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.block_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.project.weight", "mlp.2.weight")):
                # The residual stream then has the same scale at any depth.
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.dropout(self.characters(inputs) + self.places(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Attention(nn.Module):
    """Causal self-attention: each position uses itself and earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attend = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.attend(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
