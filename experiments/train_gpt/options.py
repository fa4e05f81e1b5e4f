"""Options of a training run: `Recipe` determines the losses, `RunOptions` must not change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from tasp_lab.errors import QuantityError, WorkloadError
from tasp_lab.units import parse_integer
from tasp_lab.workload.layer import Workload

LICENSE = Path(__file__).parents[2] / "LICENSE"


def _integer(_: object, tokens: Sequence[Token]) -> int:
    try:
        return parse_integer(tokens[0].value)
    except QuantityError as error:
        raise ValueError(str(error)) from error


def _whole(text: str) -> Parameter:
    return Parameter(converter=_integer, help=text)


@Parameter(name="*")
@dataclass(frozen=True)
class Recipe:
    """The options that determine the losses, up to rounding. Raises `WorkloadError` for invalid values.

    >>> Recipe(heads=8, head_dim=16).width
    128
    """

    layers: Annotated[int, _whole("Blocks of the model.")] = 2
    heads: Annotated[int, _whole("Query heads.")] = 4
    kv_heads: Annotated[int, _whole("Heads of keys and values.")] = 2
    head_dim: Annotated[int, _whole("Elements per head, an even number.")] = 32
    seq: Annotated[int, _whole("Positions of a sequence.")] = 512
    batch: Annotated[int, _whole("Sequences per step, over all ranks.")] = 4
    learning_rate: Annotated[float, Parameter(help="Learning rate of AdamW.")] = 1e-3
    seed: Annotated[int, _whole("Seed of parameters and sequences.")] = 0
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
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.batch * self.seq

    def attention(self, batch: int) -> Workload:
        """One attention layer on `batch` sequences."""
        return Workload(self.seq, batch, self.heads, self.kv_heads, self.head_dim, self.dtype, "causal")


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The options of one run. A checkpoint may be resumed with other run options."""

    steps: Annotated[int, _whole("Total steps, including those before a checkpoint.")] = 50
    schedule: Annotated[
        str, Parameter(help="Any attention schedule, such as tasp, zigzag-token-ring, ulysses or usp:2x4.")
    ] = "tasp"
    sequence_parallel: Annotated[
        int | None, _whole("Ranks per sequence; all, if not given. Groups of ranks are data-parallel.")
    ] = None
    checkpoint_activations: Annotated[
        bool, Parameter(negative=(), help="Recompute each block in the backward pass instead of storing activations.")
    ] = False
    text: Annotated[
        Path,
        Parameter(help="The text file to train on; this repository's license, if not given.", show_default=False),
    ] = LICENSE
    save: Annotated[Path | None, Parameter(help="Write a checkpoint into this folder.")] = None
    save_every: Annotated[int, _whole("With --save: steps between checkpoints; the last step is always saved.")] = 10
    resume: Annotated[Path | None, Parameter(help="Resume from the checkpoint in this folder.")] = None

    def __post_init__(self) -> None:
        for name in ("steps", "save_every"):
            if vars(self)[name] < 1:
                raise WorkloadError(f"{name.replace('_', ' ')}: {vars(self)[name]}, expected 1 or more")

    def shape(self, recipe: Recipe, world_size: int) -> tuple[int, int]:
        """The number of groups of ranks, and of ranks in each. Raises `WorkloadError`.

        >>> RunOptions(sequence_parallel=4).shape(Recipe(batch=6), world_size=8)
        (2, 4)
        """
        ranks = world_size if self.sequence_parallel is None else self.sequence_parallel
        if ranks < 1 or world_size % ranks:
            raise WorkloadError(f"sequence parallel: {ranks}, expected a divisor of the {world_size} ranks")
        groups = world_size // ranks
        if recipe.batch % groups:
            raise WorkloadError(f"batch: {recipe.batch}, expected a multiple of the {groups} groups of ranks")
        return groups, ranks
