"""``tasp-lab gpu-check --one --measure``: what one GPU settles of the numbers that predictions assume, in 15 minutes.

`MEASUREMENTS` is the plan: questions in the order of their worth, each with its share of the time and its cases.
`docs/one_gpu.md` is made from it. `measure` runs one of them and writes its tables.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from runtime.kernels.libraries import LIBRARIES, Case, KernelCall, Overlap, RankZero
from runtime.kernels.timing import CallShape, Device, table_headers
from tasp_lab.core.errors import RunError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import ProgressCallback
from tasp_lab.validation.gpu_record import in_one_line

DEFAULT_MINUTES = 15
_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class Measurement:
    """A question that one GPU settles.

    Attributes
    ----------
    question, changes : what is unknown, and which numbers of the product the answer changes.
    minutes : its part of `DEFAULT_MINUTES`; what it does not need is left to those after it.
    cases : what is measured, the most important first: the time may end before the last one.
    """

    name: str
    question: str
    changes: str
    minutes: float
    cases: tuple[Case, ...]

    @property
    def tables(self) -> tuple[str, ...]:
        """What it writes, in files of these names with the ending ``.csv``."""
        return tuple(dict.fromkeys(name for case in self.cases for name in case.tables))


_LAYER, _TASP = CallShape(1, 64, 8, 128, 16 * _KIB, 16 * _KIB, True), CallShape(1, 20, 20, 64, 420, 420, False)
_HALVES = ((8 * _KIB, 16 * _KIB), (16 * _KIB, 8 * _KIB))


def _of_length(shape: CallShape, queries: int, keys: int = 0, **others: bool) -> CallShape:
    return shape._replace(queries=queries, keys=keys or queries, **others)


def _rank_zero() -> tuple[RankZero, ...]:
    """Transformer Engine first: its variants decide most choices that are wrong."""
    engine = [
        RankZero("transformer-engine", _of_length(_LAYER, positions, causal=causal), f"{travels} {layout}")
        for positions, layout, travels, causal in product(
            (16 * _KIB, 8 * _KIB), ("thd", "bshd"), ("p2p", "all_gather", "a2a"), (True, False)
        )
    ]
    full = _LAYER._replace(causal=False)
    others = [
        RankZero("ring-flash-attn", _LAYER, "zigzag_ring"), RankZero("ring-flash-attn", full, "ring"),
        RankZero("yunchang", _LAYER, "8x1"), RankZero("yunchang", _LAYER, "2x4"), RankZero("yunchang", _LAYER, "1x8"),
        RankZero("hamilton", full._replace(kv_heads=64), "K_8"),
        RankZero("torch", _LAYER, "alltoall"), RankZero("torch", _LAYER, "allgather"),
    ]  # fmt: skip
    return (*engine[:6], *others, *engine[6:])


def _overlaps() -> tuple[Overlap, ...]:
    """All kernels and shapes with one setting before the next setting, so that a short run has some of each."""
    tasp = _TASP._replace(batch=48)
    shapes = (_LAYER, *(_of_length(tasp, positions) for positions in (1260, 5040, 12600)))
    settings = product((16, 1, 32, 4, 8, 2), (16 * _MIB, 128 * _MIB), (0, 50, 500), (False, True))
    libraries = ("flash-attention-2", "flash-attention-3", "cudnn")
    return tuple(
        Overlap(library, shape, *setting) for setting in settings for shape, library in product(shapes, libraries)
    )


_TASP_GRID = tuple(
    _of_length(_TASP._replace(batch=batch), 420 * m) for m, batch in product((1, 4, 12, 48, 128), (1, 12, 48))
    if 8 * 420 * m * batch <= 10_000_000
)  # fmt: skip
"""Block lengths of the script of TASP's code on eight ranks, which leaves out what has more positions."""

MEASUREMENTS: tuple[Measurement, ...] = (
    Measurement(
        "rank 0 of 8", "what do libraries run beside their attention calls, and how long do their hosts take?",
        "host models and helper kernels of [stacks](stacks.md): `tasp_lab/machines/stacks/`",
        5,
        _rank_zero(),
    ),
    Measurement(
        "packed calls", "how much slower is cuDNN with packed sequences (thd) than with dense ones (bshd)?",
        "cuDNN's constants (`calibrate --kernels cudnn.csv`), and a kernel of its own for packed calls",
        2,
        tuple(
            KernelCall(library, shape, passing)
            for shape in (
                *(_LAYER._replace(heads=heads, kv_heads=kv, queries=queries, keys=keys, causal=queries == keys)
                  for heads, kv in ((64, 8), (8, 1)) for queries, keys in ((16 * _KIB, 16 * _KIB), *_HALVES)),
                CallShape(1, 8, 1, 128, 128 * _KIB, 128 * _KIB, True),
            )
            for passing, library in product(("fwd", "bwd"), ("cudnn", "cudnn-thd"))
        ),
    ),
    Measurement(
        "overlap", "how long does a message wait for multiprocessors, and how much does it slow a call?",
        "contention, and `messages_wait` of NCCL ([contention](attention.md#contention))",
        3,
        _overlaps(),
    ),
    Measurement(
        "TASP's shapes", "are FlashAttention at the shapes of TASP's script and its short calls backward as fast as "
        "predicted?",
        "FlashAttention's constants (`calibrate --kernels flash-attention-2.csv`), and with them [TASP](tasp.md)",
        1,
        (
            *(KernelCall("flash-attention-3", CallShape(16 * _KIB // s, 16, 16, 128, s, s, True), "bwd")
              for s in (512, 1024, 2048, 4096)),
            *(KernelCall(library, shape, "fwd")
              for shape, library in product(_TASP_GRID, ("flash-attention-2", "flash-attention-3"))),
        ),
    ),
    Measurement(
        "few tiles", "do cuDNN and FlashAttention-3 split keys where queries are few?",
        "the rule of split keys of these kernels ([kernels](kernels.md#the-model))",
        1,
        tuple(KernelCall(library, CallShape(1, 9, 9, 128, queries, 62208, False), "fwd")
              for queries, library in product((512, 1024, 2048, 4096), ("cudnn", "flash-attention-3"))),
    ),
    Measurement(
        "linear attention", "how fast are chunks of linear attention?",
        "[linear attention](linear_attention.md), whose rate is assumed to be that of softmax attention",
        2,
        tuple(
            KernelCall(library, CallShape(1, 16, 16, 128, positions * _KIB, positions * _KIB, True), passing)
            for positions, passing, library in product(
                (8, 64, 16, 32), ("fwd", "bwd"), ("fla-chunk_simple_gla", "fla-chunk_gla")
            )
        ),
    ),
)  # fmt: skip
"""In the order in which they run; the steps of ``gpu-check --one`` follow in what is left of the time."""

COLUMNS = {
    "rank-0": "a layer without links: `time_us` by CUDA events, `host_us` until it is queued; the shape is rank 0's",
    "gpu-kernels": "`what` was measured; each `kernel` of one call, its `calls`, and their `time_us` together",
    "overlap": "times of the call and of the copy, alone and together; `copy_us` is from when the copy is ready, "
    "`together_us` from the start of the call to the end of both",
}
"""Tables that no command reads; all others are tables of kernels."""


@dataclass
class Tables:
    """The tables of a folder; each row that is added is written at once, as a GPU may fail in the next call."""

    folder: Path
    device: Device
    machine: str
    rows: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    def add(self, name: str, rows: Sequence[dict[str, object]]) -> None:
        table = self.rows.setdefault(name, [])
        table += rows
        kernel = name.removeprefix("fla-") if name in LIBRARIES else ""
        text = io.StringIO()
        lines = [*table_headers(self.device, kernel), f"# machine: {self.machine}"]
        text.write("\n".join(lines) + "\n")
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in table for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        write_whole(self.folder / f"{name}.csv", text.getvalue().encode())


def measure(
    measurement: Measurement,
    tables: Tables,
    ends_s: float,
    progress: ProgressCallback,
    numbers: dict[str, object],
    clock_s: Callable[[], float] = time.monotonic,
) -> str:
    """Measure until `ends_s` on the clock. What is missing, failed or found no time is added to `numbers`, by name.

    Returns why nothing could be measured, else an empty text. Raises `RunError` if a case has failed.
    """
    missing: dict[str, None] = {}
    failures, late, measured = [], [], 0
    for case in measurement.cases:
        if problem := case.problem(tables.device):
            if problem not in missing:
                progress(f"not measured: {problem}")
            missing[problem] = None
        elif clock_s() >= ends_s:
            late.append(case.label)
        else:
            progress(case.label)
            try:
                for name, rows in case.rows(tables.device).items():
                    tables.add(name, rows)
                measured += 1
            except Exception as error:
                failures.append(f"{case.label}: {in_one_line(error)}")
    numbers["measured"] = measured
    for name, found in (("missing", list(missing)), ("no_time_for", late), ("failed", failures)):
        numbers |= {name: found} if found else {}
    if failures:
        raise RunError(f"{len(failures)} failed: {failures[0]}")
    return "" if measured else "; ".join([*missing, *(["no time was left"] if late else [])])
