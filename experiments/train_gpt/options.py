"""Options of a training run: `Recipe` determines the losses, `RunOptions` must not change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from tasp_lab.core.choices import Decay
from tasp_lab.core.errors import QuantityError, ScheduleError, WorkloadError
from tasp_lab.core.units import parse_integer
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import LINEAR, LINEAR_KIND, spec_of
from tasp_lab.workload.layer import Workload, expand_layers
from tasp_lab.workload.sequence_layout import SequenceLayout

VOCABULARY = 256
"""Tokens are bytes."""

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

    layers: Annotated[
        str,
        Parameter(
            help="Layers: L for linear and S for softmax attention, such as LLSLLS or 4xLLLS; or their number, "
            "all of softmax attention."
        ),
    ] = "2"
    decay: Annotated[Decay, Parameter(help="Decay of the states of linear layers.")] = "none"
    heads: Annotated[int, _whole("Query heads.")] = 4
    kv_heads: Annotated[int, _whole("Heads of keys and values.")] = 2
    head_dim: Annotated[int, _whole("Elements per head, an even number.")] = 32
    seq: Annotated[int, _whole("Positions of a sequence.")] = 512
    batch: Annotated[int, _whole("Sequences per step, over all ranks.")] = 4
    learning_rate: Annotated[float, Parameter(help="Learning rate of AdamW.")] = 1e-3
    seed: Annotated[int, _whole("Seed of parameters and sequences.")] = 0
    dtype: Annotated[Literal["fp32", "bf16"], Parameter(help="bf16: autocast.")] = "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _expanded(self.layers))
        self.layer("S", self.batch)
        for name, fits, expected in (
            ("decay", self.decay == "none" or "L" in self.layers, "none, as no layer is linear"),
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

    def layer(self, kind: str, batch: int) -> Workload:
        """A layer of linear (``L``) or softmax (``S``) attention on `batch` sequences."""
        stack = Workload(
            self.seq, batch, self.heads, self.kv_heads, self.head_dim, self.dtype, "causal",
            kind="hybrid", decay=self.decay, layers=self.layers,
        )  # fmt: skip
        return stack.of(kind)

    @property
    def decays(self) -> tuple[float, ...]:
        """With decay ``head`` that of each KV head, 1 - 2^(-5 - h) as in RetNet (arXiv:2307.08621); else none."""
        return tuple(1 - 2.0 ** (-5 - head) for head in range(self.kv_heads)) if self.decay == "head" else ()


def _expanded(layers: str) -> str:
    """The letters of all layers; a number means as many of softmax attention."""
    try:
        number = parse_integer(layers)
    except QuantityError:
        return expand_layers(layers)
    if number < 1:
        raise WorkloadError(f"layers: {number}, expected 1 or more")
    return expand_layers(f"{number}xS")


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The options of one run. A checkpoint may be resumed with other run options."""

    steps: Annotated[int, _whole("Total steps, including those before a checkpoint.")] = 50
    schedule: Annotated[
        str, Parameter(help="Any schedule of softmax attention, such as tasp, zigzag-token-ring, ulysses or usp:2x4.")
    ] = "tasp"
    linear_schedule: Annotated[
        str, Parameter(help="Any schedule of linear attention, such as lasp-2, all-scan or lasp.")
    ] = "lasp-2"
    sequence_parallel: Annotated[
        int | None, _whole("Ranks per sequence; all, if not given. Groups of ranks are data-parallel.")
    ] = None
    checkpoint_activations: Annotated[
        bool, Parameter(negative=(), help="Recompute each block in the backward pass instead of storing activations.")
    ] = False
    text: Annotated[
        Path, Parameter(help="The text file to train on; this repository's license, if not given.", show_default=False)
    ] = LICENSE
    save: Annotated[Path | None, Parameter(help="Write a checkpoint into this folder.")] = None
    save_every: Annotated[int, _whole("With --save: steps between checkpoints; the last step is always saved.")] = 10
    resume: Annotated[Path | None, Parameter(help="Resume from the checkpoint in this folder.")] = None

    def __post_init__(self) -> None:
        for name in ("steps", "save_every"):
            if vars(self)[name] < 1:
                raise WorkloadError(f"{name.replace('_', ' ')}: {vars(self)[name]}, expected 1 or more")

    def layouts(self, recipe: Recipe, ranks: int) -> dict[str, SequenceLayout]:
        """Where positions lie in the layers of each kind that the model has. Raises `ScheduleError`.

        Both schedules are checked, also that of a kind of layers that the model does not have.

        >>> {kind: each.name for kind, each in RunOptions(schedule="tasp").layouts(Recipe("LLS"), ranks=4).items()}
        {'L': 'contiguous', 'S': 'zigzag'}
        """
        if self.schedule in LINEAR:
            raise ScheduleError(
                f"schedule {self.schedule!r} is for linear attention, expected one for softmax attention"
            )
        found = {
            "L": spec_of(self.linear_schedule, LINEAR_KIND)[0].layout_on(recipe.layer("L", 1), ranks),
            "S": attention_layout(self.schedule, recipe.layer("S", 1), ranks),
        }
        return {kind: found[kind] for kind in sorted(set(recipe.layers))}

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
