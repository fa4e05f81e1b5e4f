"""What a training run is told, in two parts: what decides its losses, and what must not change them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tasp_lab.cli.layer_options import whole_number
from tasp_lab.errors import WorkloadError
from tasp_lab.workload import Workload

LICENSE = Path(__file__).parents[2] / "LICENSE"


def _whole(text: str) -> Parameter:
    return Parameter(converter=whole_number, help=text)


@Parameter(name="*")
@dataclass(frozen=True)
class Recipe:
    """What decides the losses, up to rounding. Raises `WorkloadError` for what cannot be trained.

    >>> Recipe(heads=8, head_dim=16).width
    128
    """

    layers: Annotated[int, _whole("Blocks of the model.")] = 2
    heads: Annotated[int, _whole("Query heads.")] = 4
    kv_heads: Annotated[int, _whole("Heads of keys and values.")] = 2
    head_dim: Annotated[int, _whole("Elements per head, an even number.")] = 32
    seq: Annotated[int, _whole("Positions of a sequence.")] = 512
    batch: Annotated[int, _whole("Sequences per step, over all ranks.")] = 4
    learning_rate: Annotated[float, Parameter(help="Of AdamW.")] = 1e-3
    seed: Annotated[int, _whole("Of the parameters and of the sequences.")] = 0
    dtype: Annotated[Literal["fp32", "bf16"], Parameter(help="bf16: autocast.")] = "fp32"

    def __post_init__(self) -> None:
        self.attention(self.batch)
        for name, fits, expected in (
            ("layers", self.layers >= 1, "1 or more"),
            ("head dim", self.head_dim % 2 == 0, "an even number"),
            ("learning rate", self.learning_rate > 0 and math.isfinite(self.learning_rate), "a finite number above 0"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not fits:
                raise WorkloadError(f"{name}: {vars(self)[name.replace(' ', '_')]}, expected {expected}")

    @property
    def width(self) -> int:
        """Elements of the residual stream at a position."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.batch * self.seq

    def attention(self, batch: int) -> Workload:
        """One attention layer on so many of the sequences."""
        return Workload(self.seq, batch, self.heads, self.kv_heads, self.head_dim, self.dtype, "causal")


@Parameter(name="*")
@dataclass(frozen=True)
class Way:
    """How a run goes about it. A checkpoint may be resumed another way."""

    steps: Annotated[int, _whole("Steps, those before a checkpoint included.")] = 50
    schedule: Annotated[
        str, Parameter(help="ring-attention, zigzag-ring-attention, striped-ring-attention or tasp.")
    ] = "tasp"
    sequence_parallel: Annotated[
        int | None, _whole("How many ranks share a sequence; all, if not given. The others are data-parallel.")
    ] = None
    checkpoint_activations: Annotated[
        bool, Parameter(negative=(), help="Keep only the input of each block, and compute the block again.")
    ] = False
    text: Annotated[
        Path,
        Parameter(help="A file whose bytes are learned; this repository's license, if not given.", show_default=False),
    ] = LICENSE
    save: Annotated[Path | None, Parameter(help="Write a checkpoint into this folder.")] = None
    save_every: Annotated[int, _whole("With --save, write it every so many steps, and after the last.")] = 10
    resume: Annotated[Path | None, Parameter(help="Go on from the checkpoint in this folder.")] = None

    def __post_init__(self) -> None:
        for name in ("steps", "save_every"):
            if vars(self)[name] < 1:
                raise WorkloadError(f"{name.replace('_', ' ')}: {vars(self)[name]}, expected 1 or more")

    def shape(self, recipe: Recipe, world_size: int) -> tuple[int, int]:
        """How many groups of ranks there are, and how many ranks are in each. Raises `WorkloadError`.

        >>> Way(sequence_parallel=4).shape(Recipe(batch=6), world_size=8)
        (2, 4)
        """
        ranks = world_size if self.sequence_parallel is None else self.sequence_parallel
        if ranks < 1 or world_size % ranks:
            raise WorkloadError(f"sequence parallel: {ranks}, expected a divisor of the {world_size} ranks")
        groups = world_size // ranks
        if recipe.batch % groups:
            raise WorkloadError(f"batch: {recipe.batch}, expected a multiple of the {groups} groups of ranks")
        return groups, ranks
