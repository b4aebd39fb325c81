"""A recurrent model for text, whose inputs are token ids."""

from __future__ import annotations

import torch
from torch import nn

from ..data.on_disk import TensorOnDisk
from ..errors import UserError


class CharLSTM(nn.Module):
    """Embedding, LSTM layers, and an affine layer on the last step's state."""

    def __init__(self, tokens: int, outputs: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores of the token after (batch, length) ids."""
        states, _ = self.lstm(self.embedding(ids))
        scores: torch.Tensor = self.output(states[:, -1])
        return scores

    def check(self, *inputs: torch.Tensor | TensorOnDisk | None) -> None:
        """Raise unless inputs are ids of known tokens."""
        for ids in inputs:
            if ids is not None and ids.dtype != torch.int64:
                raise UserError(
                    f"model charlstm: expected token ids (int64), found {ids.dtype}; use mlp, or the data shakespeare"
                )
            if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokens:
                raise UserError(
                    f"model charlstm: expected token ids 0..{self.tokens - 1}, found {int(ids.min())}.."
                    f"{int(ids.max())}; set tokens to how many there are (--set model.tokens=N)"
                )


def charlstm(
    shape: tuple[int, ...], outputs: int, embedding: int = 8, hidden: int = 64, layers: int = 1, tokens: int = 0
) -> nn.Module:
    """Build an LSTM for the next character; hidden=256, layers=2 is LEAF's. Inputs are token ids (data `shakespeare`).

    `tokens` is the number of ids, 0 for the number of outputs.
    """
    if len(shape) != 1:
        raise UserError(
            f"model charlstm: expected rows of token ids, found inputs of shape {shape}; use the data shakespeare, or "
            f"mlp or cnn"
        )
    return CharLSTM(tokens or outputs, outputs, embedding, hidden, layers)


charlstm.takes_tokens = True  # type: ignore[attr-defined]  # its inputs stay whole numbers: `models.takes_numbers`
