"""``tasp-lab gpu-check``: the first hour on real GPUs as one command, with one record.

Every rank of a torchrun job runs the steps of `tasp_lab.validation.gpu_steps`; the first failure ends the job. The
record is one JSON file and one page of text, written after every step.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from runtime.checks.watch import CheckedGroup, End, Watch, store_of_group
from runtime.ranks.torchrun import choose_backend, join, started_ranks
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import OutputError, RunError, TaspLabError, first_line
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress, on_one_line, print_line
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Formats, Part, Table, to_text
from tasp_lab.core.version import VERSION
from tasp_lab.prediction.inputs import MachineLike, wires
from tasp_lab.validation.gpu_steps import FULL, HOST, QUICK, STEPS, Context, Numbers, Outcome, Sizes, Step

JOIN_LIMIT_S = 300.0

Verdict = Literal["passed", "failed", "skipped", "interrupted"]
RecordVerdict = Literal["passed", "failed", "interrupted", "running"]

JSON_NAME, TEXT_NAME = "gpu-check.json", "gpu-check.txt"


@dataclass(frozen=True)
class StepResult:
    """What came of a step: `message` is why it failed, was skipped or interrupted, else empty; `seconds` its time.

    A step is ``skipped`` also where numbers are measured but limits do not apply.
    """

    step: Step
    verdict: Verdict
    numbers: Numbers
    seconds: float
    message: str


@dataclass(frozen=True, repr=False)
class Record(Report):
    """All steps of a check so far.

    `is_reporter` is False on the ranks that leave the output to rank 0; `ended_by` is why it ended between two steps.
    """

    machine: str
    world_size: int
    backend: str
    quick: bool
    steps: tuple[StepResult, ...] = ()
    verdict: RecordVerdict = "running"
    is_reporter: bool = True
    ended_by: str = ""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def error(self) -> str | None:
        """Why the check did not pass, on one line."""
        first = next((step for step in self.steps if step.verdict in ("failed", "interrupted")), None)
        if first is not None:
            return f"gpu-check: step {first.step.number}, {first.step.name}, {first.verdict}: {first.message}"
        return f"gpu-check: {self.verdict} between steps: {self.ended_by}" if self.ended_by else None

    def with_step(self, step: StepResult) -> Record:
        """The record with one more step; one that did not pass ends it."""
        ended = step.verdict in ("failed", "interrupted")
        return replace(self, steps=(*self.steps, step), verdict=step.verdict if ended else self.verdict)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {
            "record": "gpu-check",
            "version": VERSION,
            "date": self.date,
            "machine": self.machine,
            "world_size": self.world_size,
            "backend": self.backend,
            "quick": self.quick,
            "verdict": self.verdict,
            "steps": [
                row | {"numbers": _plain(step.numbers)} for row, step in zip(self.records(), self.steps, strict=True)
            ],
        }
        return found if self.error is None else found | {"error": self.error}

    def records(self) -> list[dict[str, object]]:
        """A row per step, without its numbers."""
        return [
            {
                "number": result.step.number, "name": result.step.name, "proves": result.step.proves,
                "verdict": result.verdict, "seconds": result.seconds, "message": result.message,
                "if_it_fails": result.step.if_it_fails,
            }
            for result in self.steps
        ]  # fmt: skip

    def parts(self) -> list[Part]:
        how = "quick" if self.quick else "all"
        title = f"gpu-check {self.machine}, {self.world_size} ranks, {self.backend}, {how}, {self.date}: {self.verdict}"
        columns: Formats = {
            "": "{number}", "step": "{name}", "verdict": "{verdict}", "time": "{seconds:.1f} s",
            "proves, or why not": lambda row: on_one_line(row["message"] or row["proves"]),
        }  # fmt: skip
        parts: list[Part] = [*Table.of(title, self.records(), columns, (1, 2, 4))] or [title]
        for step in self.steps:
            parts += _step_parts(step)
        return parts

    def save(self, folder: Path) -> None:
        """Write both files. Raises `OutputError`."""
        document = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        write_whole(folder / JSON_NAME, f"{document}\n".encode())
        write_whole(folder / TEXT_NAME, f"{to_text(self.parts())}\n".encode())


def check_folder(folder: Path) -> None:
    """Make the folder of the record, unless it is there. Raises `OutputError` if the record cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    for name in (JSON_NAME, TEXT_NAME):
        check_writable(folder / name)


def _plain(value: object) -> object:
    """A value as JSON; numbers that are not finite become texts, as JSON has none.

    >>> _plain({"a": [math.inf, (1, math.nan)], "b": None, "c": Path("x")})
    {'a': ['inf', [1, 'nan']], 'b': None, 'c': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _step_parts(result: StepResult) -> list[Part]:
    """The numbers of a step, and what to do if it failed."""
    step = result.step
    parts: list[Part] = ["", f"{step.number} {step.name}: {result.verdict}", f"   proves: {step.proves}"]
    if result.message:
        parts.append(f"   {result.message}")
    if result.verdict == "failed":
        parts.append(f"   what it means: {step.if_it_fails}")
    for name, value in result.numbers.items():
        parts += _number_parts(name, value)
    return parts


def _number_parts(name: str, value: object) -> list[Part]:
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        columns = list(dict.fromkeys(key for each in value for key in each))
        rows = [[_text(each.get(key, "")) for key in columns] for each in value]
        texts = [
            at for at, key in enumerate(columns) if not all(isinstance(row.get(key, 0), (int, float)) for row in value)
        ]
        return [Table(name.replace("_", " "), columns, rows, texts)]
    if isinstance(value, Mapping):
        return [f"   {name}:", *(f"      {key}: {_text(each)}" for key, each in value.items())]
    if isinstance(value, str) and "\n" in value:
        return [f"   {name}:", *(f"      {line}" for line in value.splitlines())]
    return [f"   {name}: {_text(value)}"]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(each)}" for key, each in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


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
    returns (see `runtime.checks.watch`).

    Parameters
    ----------
    machine : the machine, whose ranks must be as many as were started; a full mesh of them if None.
    quick : whether to use `QUICK` in place of `FULL`.
    output : the folder of the record, made if it is not there.
    backend : ``gloo`` checks the logic on CPUs; else it is ``nccl``, also for RCCL, which needs a GPU per rank.
    progress : called on rank 0 with lines of progress.
    show : called with the record on rank 0 when the check ends early.
    steps, sizes : what is checked; for tests.

    Raises `RunError` without torchrun, for another number of ranks, and for GPUs that are missing; `OutputError` for a
    folder that cannot be written; and what loading a machine raises. All of that is checked before ranks join.
    """
    started, rank = started_ranks(), int(os.environ["RANK"])
    chosen = wires(f"full-mesh:{started}" if machine is None else machine)
    name, expected = chosen.topology.name, chosen.topology.world_size
    if expected != started:
        raise RunError(
            f"{name} has {expected} ranks, but {started} were started: name a machine of {started}, or start {expected}"
        )
    library = choose_backend("gloo" if backend == "gloo" else "nccl")
    folder = Path(output)
    if rank == 0:
        check_folder(folder)
    record = Record(name, started, library, quick, is_reporter=rank == 0)
    session = Session(record, folder, show, progress if rank == 0 else no_progress)
    with Watch(rank, started, session.report) as watch, contextlib.ExitStack() as joined:
        session.begin(steps[0], watch, JOIN_LIMIT_S)
        try:
            joined.enter_context(join(library))
            group = CheckedGroup()
            if group.backend != library:
                raise RunError(f"the ranks have joined over {group.backend}, expected {library}")
        except Exception as error:
            watch.fail(in_one_line(error), None)
        watch.connect(store_of_group())
        sizes = sizes or ((QUICK if quick else FULL) if group.on_gpu else HOST)
        context = Context(group, chosen, sizes, session.progress)
        for step in steps:
            session.begin(step, watch, sizes.step_limit_s)
            try:
                session.add(run_step(step, context))
            except Exception as error:
                watch.fail(in_one_line(error), group.store)
            if session.record.verdict == "failed":
                watch.leave(group.store)
        record = session.end()
        group.barrier()
    return record


def result_of(step: Step, outcome: Outcome, seconds: float) -> StepResult:
    """The result of a step with this outcome."""
    if outcome.failure:
        return StepResult(step, "failed", outcome.numbers, seconds, outcome.failure)
    return StepResult(step, "skipped" if outcome.skipped else "passed", outcome.numbers, seconds, outcome.skipped)


def run_step(step: Step, context: Context) -> StepResult:
    """Run a step on all ranks; the same verdict on all of them."""
    began_s = time.perf_counter()
    if context.group.world_size < step.min_ranks:
        return StepResult(step, "skipped", {}, 0.0, f"needs {step.min_ranks} ranks")
    outcomes = context.group.gather(step.run(context))
    failures = [f"rank {rank}: {outcome.failure}" for rank, outcome in enumerate(outcomes) if outcome.failure]
    first = replace(outcomes[0], failure=failures[0] if failures else "")
    return result_of(step, first, time.perf_counter() - began_s)


def in_one_line(error: Exception) -> str:
    """The error on one line; of those that are not ours also the type."""
    text = str(error) if isinstance(error, TaspLabError) else f"{type(error).__name__}: {first_line(error)}"
    return on_one_line(text)


class Session:
    """The record as it grows, and the step that runs; `report` is called by the thread of the watch."""

    def __init__(self, record: Record, folder: Path, show: Show, progress: ProgressCallback) -> None:
        self.record, self.progress = record, progress
        self._folder, self._show = folder, show
        self._step: Step | None = None
        self._began_s = 0.0

    def begin(self, step: Step, watch: Watch | None = None, limit_s: float = 0.0) -> None:
        self._step, self._began_s = step, time.perf_counter()
        if watch is not None:
            watch.limit(f"step {step.number}, {step.name},", limit_s)
        self.progress(f"step {step.number}: {step.name}")

    def add(self, result: StepResult) -> None:
        self._step, self.record = None, self.record.with_step(result)
        why = f" ({result.message})" if result.message else ""
        self.progress(f"step {result.step.number}: {result.verdict} in {result.seconds:.1f} s{why}")
        self._save()

    def end(self) -> Record:
        """The record, which has passed unless a step failed."""
        if self.record.verdict == "running":
            self.record = replace(self.record, verdict="passed")
            self._save()
        return self.record

    def report(self, end: End | None) -> None:
        """Write and show the record of a check that ends early; the step that runs has failed or is interrupted."""
        if self.record.verdict == "passed":
            print_line(f"tasp-lab: {end.message if end else 'ended'} after all steps had passed", sys.stderr)
            return
        if end is not None and self.record.verdict == "running" and self._step is not None:
            seconds = time.perf_counter() - self._began_s
            self.record = self.record.with_step(StepResult(self._step, end.kind, {}, seconds, end.message))
        elif end is not None and self.record.verdict == "running":  # between two steps
            self.record = replace(self.record, verdict=end.kind, ended_by=end.message)
        print_line(f"tasp-lab: {self.record.error}; record: {self._folder / JSON_NAME}", sys.stderr)
        self._save()
        self._show(self.record)

    def _save(self) -> None:
        if self.record.is_reporter:
            self.record.save(self._folder)
