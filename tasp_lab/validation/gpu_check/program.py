"""The check as a program that every rank runs: from its arguments to the record."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from runtime.gpu_check.group import CheckedGroup, store_of_group
from runtime.gpu_check.watch import End, Watch
from runtime.ranks.torchrun import choose_backend, join, started_ranks
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError, TaspLabError, first_line
from tasp_lab.core.progress import ProgressCallback, no_progress, on_one_line, print_line
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.inputs import MachineLike, wires
from tasp_lab.validation.gpu_check.record import JSON_NAME, Record, StepResult, check_folder
from tasp_lab.validation.gpu_check.registry import STEPS
from tasp_lab.validation.gpu_check.sizes import Sizes, sizes_for
from tasp_lab.validation.gpu_check.steps import Context, Step, run_step

JOIN_LIMIT_S = 300.0

Show = Callable[[Record], None]


def gpu_check(
    machine: MachineLike | None = None,
    *,
    quick: bool = False,
    output: Path | str = "gpu-check",
    backend: BackendKind = "auto",
    progress: ProgressCallback = no_progress,
    show: Show = lambda record: None,
    steps: Sequence[Step] = STEPS,
    sizes: Sizes | None = None,
) -> Record:
    """Check this group of ranks step by step; returns the record if all steps pass.

    Every rank calls it, started by torchrun. At the first failure, and when it is interrupted, rank 0 writes the record
    and shows it, and the processes of all ranks end, with exit code 2 or 130: a rank may be inside a call that never
    returns.

    Parameters
    ----------
    machine : the machine, whose ranks must be as many as were started; a full mesh of them if None.
    quick : whether to do less; see `tasp_lab.validation.gpu_check.sizes`.
    output : the folder of the record, made if it is not there.
    backend : ``gloo`` checks the logic on CPUs; else it is ``nccl``, also for RCCL, which needs a GPU per rank.
    progress : called on rank 0 with lines of progress.
    show : called with the record on rank 0 when the check ends early.
    steps, sizes : what is checked; for tests.

    Raises `RunError` without torchrun, for another number of ranks, and for GPUs that are missing; `OutputError` for a
    folder that cannot be written; and what loading a machine raises. All of that is checked before ranks join.
    """
    started, rank = started_ranks(), int(os.environ["RANK"])
    found = _machine(machine, started)
    expected = choose_backend("gloo" if backend == "gloo" else "nccl")
    folder = Path(output)
    if rank == 0:
        check_folder(folder)
    record = Record(found.topology.name, started, expected, quick, is_reporter=rank == 0)
    session = _Session(record, folder, show, progress if rank == 0 else no_progress)
    with Watch(rank, started, session.report) as watch, contextlib.ExitStack() as joined:
        session.begin(steps[0], watch, JOIN_LIMIT_S)
        try:
            joined.enter_context(join(expected))
            group = CheckedGroup()
            if group.backend != expected:
                raise RunError(f"the ranks have joined over {group.backend}, expected {expected}")
        except Exception as error:
            watch.fail(_told(error), None)
        watch.connect(store_of_group())
        sizes = sizes or sizes_for(on_gpu=group.on_gpu, quick=quick)
        _run(steps, Context(group, found, sizes, session.progress), session, watch)
    return session.record


def _run(steps: Sequence[Step], context: Context, session: _Session, watch: Watch) -> None:
    """Run all steps; the first failure ends this process."""
    group = context.group
    for step in steps:
        session.begin(step, watch, context.sizes.step_limit_s)
        try:
            session.add(run_step(step, context))
        except Exception as error:
            watch.fail(_told(error), group.store)
        if session.record.verdict == "failed":
            watch.leave(group.store)
    session.pass_all()
    group.barrier()


def _machine(machine: MachineLike | None, started: int) -> Machine:
    """The machine with as many ranks as were started. Raises `RunError`."""
    found = wires(f"full-mesh:{started}" if machine is None else machine)
    expected = found.topology.world_size
    if expected != started:
        raise RunError(
            f"{found.topology.name} has {expected} ranks, but {started} were started: "
            f"name a machine of {started}, or start {expected}"
        )
    return found


def _told(error: Exception) -> str:
    """The error on one line; of those that are not ours also the type."""
    text = str(error) if isinstance(error, TaspLabError) else f"{type(error).__name__}: {first_line(error)}"
    return on_one_line(text)


class _Session:
    """The record as it grows, and the step that runs; `report` is called by the thread of the watch."""

    def __init__(self, record: Record, folder: Path, show: Show, progress: ProgressCallback) -> None:
        self.record, self.progress = record, progress
        self._folder, self._show = folder, show
        self._step: Step | None = None
        self._began_s = 0.0

    def begin(self, step: Step, watch: Watch, limit_s: float) -> None:
        self._step, self._began_s = step, time.perf_counter()
        watch.limit(f"step {step.number}, {step.name},", limit_s)
        self.progress(f"step {step.number}: {step.name}")

    def add(self, result: StepResult) -> None:
        self._step, self.record = None, self.record.with_step(result)
        why = f" ({result.message})" if result.message else ""
        self.progress(f"step {result.number}: {result.verdict} in {result.seconds:.1f} s{why}")
        self._save()

    def pass_all(self) -> None:
        self.record = replace(self.record, verdict="passed")
        self._save()

    def report(self, end: End | None) -> None:
        """Write and show the record of a check that ends early; the step that runs has failed or is interrupted."""
        if self.record.verdict == "passed":
            print_line(f"tasp-lab: {end.message if end else 'ended'} after all steps had passed", sys.stderr)
            return
        if end is not None and self.record.verdict == "running":
            self.record = self._ended(end)
        print_line(f"tasp-lab: {self.record.error}; record: {self._folder / JSON_NAME}", sys.stderr)
        self._save()
        self._show(self.record)

    def _ended(self, end: End) -> Record:
        """The record with the end of the step that runs, or between two steps."""
        if self._step is None:
            return replace(self.record, verdict=end.kind, ended_by=end.message)
        seconds = time.perf_counter() - self._began_s
        return self.record.with_step(self._step.result(end.kind, {}, seconds, end.message))

    def _save(self) -> None:
        if self.record.is_reporter:
            self.record.save(self._folder)
