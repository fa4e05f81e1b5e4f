"""Reductions that Hypothesis draws: sums that are gathered along trees and copied along others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Blocks, Kind
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule

Row = tuple[int, int, int, int, int]
"""Source, destination, lane, block, and whether the source gives."""

LANES = 3


@dataclass(frozen=True)
class Case:
    """A reduction that may be wrong: which part each rank has at the start, -1 for none, and the rows of each step."""

    part: IntArray
    final: BoolArray
    steps: tuple[tuple[Row, ...], ...]
    block_bytes: tuple[int, ...]
    parts: tuple[int, ...]

    def schedule(self) -> Schedule:
        blocks = len(self.parts)
        kinds, sizes = (Kind("sum", "add"),), np.array(self.block_bytes)
        return Schedule(
            name="drawn",
            world_size=len(self.part),
            lanes=LANES,
            blocks=Blocks(kinds, np.zeros(blocks, dtype=np.int64), sizes, np.array(self.parts)),
            initial=self.part >= 0,
            final=self.final.copy(),
            steps=[Step.of(rows) for rows in self.steps],
            initial_part=self.part.copy(),
        )


@st.composite
def reductions(draw: st.DrawFn) -> Case:
    """Every sum is gathered along a tree that is drawn, by some of the ranks, and copied along another to some.

    A rank that gave its sum away may be given one again.
    """
    ranks, blocks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    part, final = np.full((ranks, blocks), -1), np.zeros((ranks, blocks), dtype=bool)
    rows: dict[int, list[Row]] = defaultdict(list)
    parts = []
    for block in range(blocks):
        having = draw(st.lists(st.integers(0, ranks - 1), unique=True, min_size=1))
        part[having, block] = range(len(having))
        parts.append(len(having))
        ready = dict.fromkeys(having, 0)
        gave: dict[int, int] = {}  # the step at which a rank gave its sum away
        again = draw(st.integers(0, 2))
        while len(having) > 1 or (again and gave):
            giver = having.pop(draw(st.integers(0, len(having) - 1)))
            taker = draw(st.sampled_from([*having, *(sorted(gave) if again else [])]))
            step = max(ready[giver], gave.get(taker, -1) + 1) + draw(st.integers(0, 2))
            rows[step].append((giver, taker, draw(st.integers(0, LANES - 1)), block, 1))
            if taker in gave:
                del gave[taker]
                having.append(taker)
                again -= 1
            ready[taker], gave[giver] = max(ready[taker], step + 1), step
        ready = {having[0]: ready[having[0]] + draw(st.integers(0, 2))}
        for rank in draw(st.lists(st.sampled_from([r for r in range(ranks) if r not in having]), unique=True)):
            source = draw(st.sampled_from(sorted(ready)))
            step = ready[source] + draw(st.integers(0, 1))
            rows[step].append((source, rank, draw(st.integers(0, LANES - 1)), block, 0))
            ready[rank] = step + 1
        final[list(ready), block] = True
    steps = tuple(tuple(draw(st.permutations(rows[index]))) for index in range(max(rows, default=-1) + 1))
    sizes = draw(st.lists(st.integers(1, 40), min_size=blocks, max_size=blocks))
    return Case(part, final, steps, tuple(sizes), tuple(parts))
