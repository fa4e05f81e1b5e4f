"""Random batches of a text, one token per byte."""

from __future__ import annotations

import torch

VOCABULARY = 256


class Batches:
    """Batches drawn from a text, the same on every rank.

    >>> Batches(b"one two three", seed=0).draw(2, 4).shape
    torch.Size([2, 5])
    """

    def __init__(self, text: bytes, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def draw(self, sequences: int, length: int) -> torch.Tensor:
        """Tokens, int64 [sequences, length + 1]: inputs are all but the last, targets all but the first.

        The text must be longer than `length`.
        """
        first = torch.randint(len(self._text) - length, (sequences, 1), generator=self.random)
        return self._text[first + torch.arange(length + 1)].long()
