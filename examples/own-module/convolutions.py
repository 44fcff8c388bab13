"""A small language model of one's own: causal convolutions, no transformer.

A recipe names ``convolutions:build``; docs/own-module.md says what the function has to return.
"""

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target of padding, and of what is not to be predicted."""


class Block(nn.Module):
    """Each token sees itself and the six before it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.look_back = nn.Conv1d(width, 4 * width, kernel_size=7)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        columns_BDL = F.pad(self.norm(x_BLD).transpose(1, 2), (6, 0))
        y_BLH = F.gelu(self.look_back(columns_BDL)).transpose(1, 2)
        return x_BLD + self.dropout(self.down(y_BLH))


class Convolutions(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, vocab_size: int, *, width: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.table(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


def build(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, object]:  # noqa: ARG001
    """The model with its weights, and its loss function."""
    return Convolutions(vocab_size, width=64, blocks=3, dropout=0.1), loss_sum


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the losses of a batch, and how many they are; padding counts for nothing."""
    logits_BLV, targets_BL = model(batch["tokens"]), batch["targets"]
    losses = F.cross_entropy(
        logits_BLV.flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses, (targets_BL != IGNORED).sum()
