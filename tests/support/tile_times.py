"""A computer whose calls take a time per tile of queries and keys, and per call: their rate depends on their shape."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from tasp_lab.machines.machine import ComputeRate
from tasp_lab.workload.kernel_shapes import KernelShape, Passing, ShapeKind


@dataclass(frozen=True)
class TileTimes:
    """Per head `tile_s` for each tile of `rows` x `columns`, masked or not, and `call_s` for each call."""

    rows: int
    columns: int
    tile_s: Fraction
    call_s: Fraction

    def time_s(self, shape: KernelShape) -> Fraction:
        tiles = -(-shape.queries // self.rows) * -(-shape.keys // self.columns)
        return self.call_s + tiles * shape.batch * shape.heads * shape.head_dim * self.tile_s

    def handed_out_s(self, shape: KernelShape) -> Fraction:
        """Until the last tile begins."""
        return self.time_s(shape) - shape.batch * shape.heads * shape.head_dim * self.tile_s

    def parts(self, shape: KernelShape) -> list[tuple[str, Fraction]]:
        return [("call", self.call_s), ("tiles", self.time_s(shape) - self.call_s)]

    def rate(self, dtype: str, passing: Passing, kind: ShapeKind = "softmax", head_dim: int = 128,
             value_dim: int | None = None) -> ComputeRate:  # fmt: skip
        return ComputeRate(self.rows * self.columns * {"forward": 4, "backward": 10}[passing] / self.tile_s)

    def scaled(self, factor: float) -> TileTimes:
        return TileTimes(self.rows, self.columns, self.tile_s / Fraction(factor), self.call_s / Fraction(factor))

    def as_assumed(self, what: str) -> TileTimes:
        return self


def tile_times() -> st.SearchStrategy[TileTimes]:
    """Tiles of a few positions, whose times are exact."""
    side, seconds = st.integers(1, 8), st.fractions(Fraction(1, 9), Fraction(9), max_denominator=9)
    return st.builds(TileTimes, side, side, seconds, st.just(Fraction(0)) | seconds)
