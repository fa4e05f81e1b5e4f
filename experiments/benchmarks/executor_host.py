"""Host time of the executor alone, beside another checkout of this repository in the same run.

``python -m experiments.benchmarks.executor_host --before CHECKOUT`` writes
``experiments/benchmarks/results/executor_host.md``. Messages are sent by a library that does nothing, and kernels take
no time, so what is left is what the executor and its layers do on the host. Times are processor time of all threads.
Both checkouts run alternately, each time in a new process; a round takes medians of many passes, and the table medians
of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from experiments.common import machine_record, markdown_table
from runtime.executor.executor import Executor
from runtime.executor.messages import Message, Wait
from runtime.executor.views import Views
from runtime.kernels.partials import Gradients, Partial
from runtime.sequence_parallel.layer import SoftmaxPasses
from tasp_lab.core.files import write_whole
from tasp_lab.schedule.rank_part import CallRow, RankPart
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import ATTENTION
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

RANKS, RANK = 8, 1
LAYER = Workload(sequence=4 * RANKS**2, head_dim=8, heads=2, kv_heads=2, dtype="fp32", mask="causal")
LAYERS = ("ring-attention", "zigzag-ring-attention", "tasp")
PATTERNS = ("ring", "multi-ring", *LAYERS)
PASSES, ROUNDS = 40, 5
RESULTS = Path(__file__).parent / "results"

Times = dict[str, tuple[float, int]]
"""By case: the seconds of a step, and the messages that the rank sends in all steps."""


class Nothing:
    """A library that sends nothing and waits for nothing."""

    channels = False
    short_bytes = 0

    def __init__(self, whole_steps: bool) -> None:
        self.whole_steps, self.receives_ahead = whole_steps, 0 if whole_steps else 4
        self.sent = 0

    def open(self, *_: object, **__: object) -> None:
        """No-op; earlier checkouts give fewer arguments."""

    def take(self, schedule: Schedule, part: RankPart, device: torch.device) -> torch.Tensor:
        return torch.empty(part.memory_bytes, dtype=torch.uint8, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        """No-op: the memory is free when nothing uses it."""

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [_at_once] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        self.sent += len(messages)
        return [_at_once] * len(messages)


def _at_once() -> None:
    """A wait that is over."""


class Zeros:
    """Kernel calls on bytes that add zeros, made beforehand."""

    def __init__(self, schedule: Schedule) -> None:
        self._zeros = [torch.zeros(size, dtype=torch.uint8) for size in schedule.block_bytes.tolist()]

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        return [(self._zeros[place.block],) for place in row.adds]

    def bound(self, blocks: Sequence[int]) -> Views:
        return [self._zeros[blocks[0]]]

    def sent(self, block: int) -> Views:
        return [self._zeros[block]]


class FreeKernel:
    """An attention kernel whose results are zeros, made once."""

    name = "free"

    def __init__(self) -> None:
        self._zeros: dict[torch.Size, torch.Tensor] = {}

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        return None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, low: int, high: int
    ) -> Partial:
        return Partial(self._of(q.shape), self._of(q.shape[:3]))

    def backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        return Gradients(self._of(q.shape), self._of(k.shape), self._of(v.shape))

    def _of(self, shape: torch.Size) -> torch.Tensor:
        return self._zeros.setdefault(shape, torch.zeros(shape))


def main() -> None:
    """Measure this checkout, or both alternately, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, to measure beside this one")
    before = parser.parse_args().before
    if before is None:
        print(json.dumps(measure()))
        return
    here = Path(__file__).parents[2]
    rounds: tuple[list[Times], list[Times]] = ([], [])
    for _ in range(ROUNDS):
        for found, checkout in zip(rounds, (before.resolve(), here), strict=True):
            found.append(_in(checkout))
    table = f"{_head()}\n\n{markdown_table(COLUMNS, [_row(case, *rounds) for case in rounds[0][0]])}\n"
    write_whole(RESULTS / "executor_host.md", table.encode())
    print(table)


COLUMNS = ("schedule, pass, executed", "messages before", "after", "us/step before", "after", "after / before")


def _in(checkout: Path) -> Times:
    """Measure another checkout, or this one, in a new process."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    ran = subprocess.run(
        [sys.executable, __file__], env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    found: Times = json.loads(ran.stdout)
    return found


def _head() -> str:
    made = machine_record()
    return (
        f"Processor time of one of {RANKS} ranks with a library that does nothing and kernels of no time, causal mask, "
        f"medians of {ROUNDS} rounds of {PASSES} passes, both checkouts alternately, made by "
        f"`python -m experiments.benchmarks.executor_host --before CHECKOUT` on {made['cores']} cores "
        f"({made['date']}, torch {torch.__version__.split('+')[0]})."
    )


def _row(case: str, before: Sequence[Times], after: Sequence[Times]) -> tuple[str, ...]:
    old, new = (statistics.median(each[case][0] for each in rounds) for rounds in (before, after))
    sent = str(before[0][case][1]), str(after[0][case][1])
    return case, *sent, f"{old * 1e6:.0f}", f"{new * 1e6:.0f}", f"{new / old:.2f}"


def measure() -> Times:
    """All cases of this checkout."""
    torch.set_num_threads(1)
    found: Times = {}
    for name in PATTERNS:
        for schedule, passing in zip(_schedules(name), ("forward", "backward"), strict=False):
            for whole_steps, executed in ((True, "per step"), (False, "per lane")):
                library = Nothing(whole_steps)
                executor = Executor(schedule, RANK, library, Zeros(schedule), as_bytes=True)
                found[f"{name}, {passing}, bytes {executed}"] = _time(_run(executor), library, schedule)
    for name in LAYERS:
        forward, backward = _schedules(name)
        library = Nothing(whole_steps=True)
        passes = SoftmaxPasses(forward, backward, RANK, FreeKernel(), 1.0, library)
        assert isinstance(forward.task, AttentionTask), "a schedule of attention has a task"
        q, k, v, dout = torch.zeros(4, 1, forward.task.layout.length(RANK), LAYER.heads, LAYER.head_dim)
        _, saved = passes.forward(q, k, v)
        layers: list[tuple[str, Schedule, Callable[[], object]]] = [
            ("forward", forward, lambda passes=passes, q=q, k=k, v=v: passes.forward(q, k, v)),  # type: ignore[misc]
            ("backward", backward, lambda passes=passes, saved=saved, dout=dout: passes.backward(saved, dout)),  # type: ignore[misc]
        ]
        for passing, schedule, run in layers:
            found[f"{name}, {passing}, a layer per step"] = _time(run, library, schedule)
    return found


def _schedules(name: str) -> Sequence[Schedule]:
    if name in ATTENTION:
        return build_schedules(name, full_mesh(RANKS), LAYER, None, AttentionOptions("both"))
    return build_schedules(name, full_mesh(RANKS), 64)


def _run(executor: Executor) -> Callable[[], None]:
    def run() -> None:
        executor.prepare()
        executor.run()

    return run


def _time(run: Callable[[], object], library: Nothing, schedule: Schedule) -> tuple[float, int]:
    """The median seconds of a step, and the messages of a pass."""
    run()
    times, library.sent = [], 0
    for _ in range(PASSES):
        began_s = time.process_time()
        run()
        times.append(time.process_time() - began_s)
    return statistics.median(times) / len(schedule.steps), library.sent // PASSES


if __name__ == "__main__":
    main()
