"""``tasp-lab gpu-check``: the tests for GPUs, then calibration and predictions beside measured times, in one record.

The tests are those of ``tests/gpu`` in a checkout. pytest runs them in this process: on every rank of a torchrun job,
where the first failure ends the check, or with ``--one`` in a process of its own, with all ranks on one device. Each
test is a step of the record, and its docstring states what a failure means.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.calibration import Calibration, calibrate, calibrate_shared_medium
from runtime.executor.transports import gpu_libraries
from runtime.kernels.timing import Device, device_name, measured_table, one_thread, the_device
from runtime.linux import host_environment
from runtime.ranks.torchrun import choose_backend, join, started_ranks
from runtime.ranks.watch import CheckedGroup, End, Watch, store_of_group
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress, print_line
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.prediction.inputs import MachineLike, wires
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, attention_names_on, by_kind
from tasp_lab.validation.gpu_record import JSON_NAME, Record, Step, Verdict, check_folder, in_one_line
from tasp_lab.validation.measurements import DEFAULT_MINUTES, MEASUREMENTS, Tables, measure
from tasp_lab.validation.validate import Trials
from tasp_lab.workload.layer import Work, Workload

TABLE_NAME = "kernel-times.csv"
JOIN_LIMIT_S = 300.0
DEFAULT_RANKS = 4

TESTS = Path(__file__).parents[2] / "tests" / "gpu"
"""They are not in the wheel: they stand on helpers of other tests, and whoever sends a record has a checkout to run."""

ON_RANKS = ("test_library.py", "test_kernels.py", "test_on_ranks.py")
ON_ONE_DEVICE = ("test_kernels.py", "test_one_device.py", "test_one_gpu.py")

_OTHER_TESTS = "The tests of the checkout are those of another version; install the checkout."


@dataclass
class Check:
    """What tests work with: all ranks on one device, or with a `group` this rank of a job.

    `schedules` (all if there are none) and `seed` are those of runs on one device; `calibration` is that of the group.
    """

    device: Device
    machine: Machine
    quick: bool = False
    group: CheckedGroup | None = None
    schedules: tuple[str, ...] = ()
    seed: int = 0
    progress: ProgressCallback = no_progress
    calibration: Calibration | None = None

    @property
    def names(self) -> Sequence[str]:
        """The schedules to run on one device."""
        attention = attention_names_on(self.machine.topology.world_size)
        return self.schedules or (*COLLECTIVES, *attention, *LINEAR)

    @property
    def on_gpu(self) -> bool:
        """Whether limits of speed apply."""
        return self.device.type == "cuda"

    def calibrate(self) -> Calibration:
        """The links of the group, measured once."""
        assert self.group is not None, "one device has no links"
        if self.calibration is None:
            measure_links = calibrate if self.on_gpu else calibrate_shared_medium
            self.calibration = measure_links(self.machine.topology, self.group.ranks, self.progress)
        return self.calibration


Show = Callable[[Record], None]


class Session:
    """The record as it grows; to pytest a plugin that makes a step of each test.

    With a watch, the first failure ends the processes of all ranks, and `report` is called by the thread of the watch.
    """

    def __init__(self, check: Check, record: Record, folder: Path, show: Show) -> None:
        self.check, self.record = check, record
        self.watch: Watch | None = None
        self.limit_s, self.ends_s = math.inf, math.inf
        self._folder, self._show = folder, show
        self._began_s, self._documents = 0.0, dict[str, str]()
        self._error: BaseException | None = None

    @property
    def numbers(self) -> dict[str, object]:
        """What the step that runs has measured."""
        return self.record.steps[-1].numbers

    def begin(self, name: str, if_it_fails: str) -> None:
        step = Step(len(self.record.steps), name, if_it_fails=if_it_fails)
        self._began_s = time.perf_counter()
        self.record.steps.append(step)
        if self.watch is not None:
            self.watch.limit(f"step {step.number}, {name},", self.limit_s)
        self.check.progress(f"step {step.number}: {name}")

    def end(self, verdict: Verdict, message: str = "") -> None:
        """End the step that runs; with a group, when it has ended on all ranks."""
        if self.check.group is not None:
            self.check.group.barrier()
        step = self.record.steps[-1]
        step.verdict, step.message, step.seconds = verdict, message, time.perf_counter() - self._began_s
        if verdict in ("failed", "interrupted") and self.record.verdict == "running":
            self.record.verdict = verdict
        why = f" ({message})" if message else ""
        self.check.progress(f"step {step.number}: {verdict} in {step.seconds:.1f} s{why}")
        self._save()

    def fail(self, error: BaseException) -> None:
        """End the step that runs with an error, and with a watch the check."""
        if self.watch is not None:
            self.watch.fail(in_one_line(error), None if self.check.group is None else self.check.group.store)
        self.end("failed", in_one_line(error))

    def run(self, name: str, if_it_fails: str, step: Callable[[dict[str, object]], str | None]) -> None:
        """Run a step that is no test: it adds its numbers, and returns why it was skipped, if it was."""
        self.begin(name, if_it_fails)
        try:
            skipped = "no time was left" if time.monotonic() >= self.ends_s else step(self.numbers)
        except Exception as error:
            self.fail(error)
        else:
            self.end("skipped" if skipped else "passed", skipped or "")

    def finish(self) -> Record:
        """The record, which has passed unless a step failed."""
        if self.record.verdict == "running":
            self.record.verdict = "passed"
            self._save()
        return self.record

    def report(self, end: End) -> None:
        """Write and show the record of a check that ends early; the step that runs has failed or is interrupted."""
        record = self.record
        if record.verdict == "passed":
            print_line(f"tasp-lab: {end.message} after all steps had passed", sys.stderr)
            return
        if record.verdict == "running":
            record.verdict = end.kind
            if record.steps and record.steps[-1].verdict == "running":
                step = record.steps[-1]
                step.verdict, step.message, step.seconds = end.kind, end.message, time.perf_counter() - self._began_s
            else:
                record.ended_by = end.message
        print_line(f"tasp-lab: {record.error}; record: {self._folder / JSON_NAME}", sys.stderr)
        self._save()
        self._show(record)

    def _save(self) -> None:
        if self.record.is_reporter:
            self.record.save(self._folder)

    def run_tests(self, files: Sequence[Path]) -> None:
        """Run tests by pytest, without the options and plugins of the tests on hosts."""
        import pytest

        folder = str(TESTS)
        arguments = ["-c", os.devnull, "--rootdir", folder, "--confcutdir", folder, "--disable-plugin-autoload"]
        arguments += [f"-pno:{name}" for name in ("cacheprovider", "terminal", "faulthandler", "warnings")]
        with one_thread():
            code = pytest.main([*arguments, "-m", "gpu", "--capture", "no", *map(str, files)], plugins=[self])
        if self._error is not None:
            raise self._error
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            self.begin("collect tests", _OTHER_TESTS)
            self.fail(RunError(f"pytest ended with exit code {int(code)}, expected tests in {folder}"))

    # Hooks of pytest

    def pytest_itemcollected(self, item: Any) -> None:
        self._documents[item.nodeid] = " ".join((item.function.__doc__ or "").split())

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.begin(nodeid.partition("::test_")[2].replace("_", " "), self._documents[nodeid])

    def pytest_runtest_setup(self, item: object) -> None:
        if time.monotonic() >= self.ends_s:
            import pytest

            pytest.skip("no time was left")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self.end("skipped", report.longrepr[2].removeprefix("Skipped: "))
        elif report.when == "call" and report.passed:
            self.end("passed")

    def pytest_exception_interact(self, node: object, call: Any, report: Any) -> None:
        if report.when == "collect":
            self.begin("collect tests", _OTHER_TESTS)
            self.fail(RunError(report.longreprtext.strip().splitlines()[-1]))
        else:
            self.fail(call.excinfo.value)

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        if excinfo.type is KeyboardInterrupt:  # else pytest has ended itself, after errors of collecting
            self._error = KeyboardInterrupt()

    def pytest_internalerror(self, excrepr: object, excinfo: Any) -> bool:
        self._error = excinfo.value
        return True


def _test_files(names: Sequence[str]) -> list[Path]:
    """The files of tests. Raises `RunError` where they, or pytest, are not installed."""
    found = [TESTS / name for name in names]
    if missing := next((path for path in found if not path.is_file()), None):
        raise RunError(
            f"gpu-check runs the tests of a checkout, and {missing} does not exist: expected tasp-lab installed by "
            "pip install -e '.[runtime]' in its repository"
        )
    if importlib.util.find_spec("pytest") is None:
        raise RunError("gpu-check needs pytest, which is not installed: pip install pytest")
    return found


def gpu_check(
    machine: MachineLike | None = None,
    *,
    quick: bool = False,
    output: Path | str = "gpu-check",
    backend: BackendKind = "auto",
    progress: ProgressCallback = no_progress,
    show: Show = lambda record: None,
    tests: Sequence[str] = ON_RANKS,
) -> Record:
    """Check this group of ranks step by step; returns the record if all steps pass.

    Every rank calls it, started by torchrun. At the first failure, and when it is interrupted, rank 0 writes the record
    and shows it, and the processes of all ranks end, with exit code 2 or 130: a rank may be inside a call that never
    returns (see `runtime.ranks.watch`).

    Parameters
    ----------
    machine : the machine, whose ranks must be as many as were started; a full mesh of them if None.
    quick : whether tests use smaller sizes and fewer runs.
    output : the folder of the record, made if it is not there.
    backend : ``gloo`` checks the logic on CPUs; else it is ``nccl``, also for RCCL, which needs a GPU per rank.
    progress : called on rank 0 with lines of progress.
    show : called with the record on rank 0 when the check ends early.
    tests : files below `TESTS`; by default all.

    Raises `RunError` without torchrun, for another number of ranks, for GPUs that are missing, and without the tests;
    `OutputError` for a folder that cannot be written; and what loading a machine raises. All of that is checked before
    ranks join.
    """
    # what can be refused is refused before ranks join: one that fails alone would leave the others waiting
    started, rank = started_ranks(), int(os.environ["RANK"])
    chosen = wires(f"full-mesh:{started}" if machine is None else machine)
    name, expected = chosen.topology.name, chosen.topology.world_size
    if expected != started:
        raise RunError(
            f"{name} has {expected} ranks, but {started} were started: name a machine of {started}, or start {expected}"
        )
    library, files = choose_backend("gloo" if backend == "gloo" else "nccl"), _test_files(tests)
    folder = Path(output)
    if rank == 0:
        check_folder(folder)
    record = Record(name, started, library, quick, is_reporter=rank == 0)
    check = Check(Device("cpu"), chosen, quick, progress=progress if rank == 0 else no_progress)
    session = Session(check, record, folder, show)
    with Watch(rank, started, session.report) as session.watch, contextlib.ExitStack() as joined:
        session.limit_s = JOIN_LIMIT_S
        session.begin(
            "join", "The job does not have the GPUs that you think it has, or NCCL cannot use them. Compare "
            "--nproc-per-node with nvidia-smi or rocm-smi, look at CUDA_VISIBLE_DEVICES, and run with NCCL_DEBUG=INFO.",
        )  # fmt: skip
        try:
            joined.enter_context(join(library))
            group = CheckedGroup()
            if group.backend != library:
                raise RunError(f"the ranks have joined over {group.backend}, expected {library}")
        except Exception as error:
            session.fail(error)
        session.watch.connect(store_of_group())
        check.group, check.device = group, group.device
        session.numbers["environment"] = {**host_environment(), **group.ranks.environment}
        session.end("passed")
        session.limit_s = (300.0 if quick else 1800.0) if check.on_gpu else 240.0
        try:
            session.run_tests(files)
        except Exception as error:
            session.fail(error)
        session.run(
            "predicted and measured times",
            "A schedule fails outside of the tests; the message names it. Large errors are no failure: they are what "
            "the record is for.",
            lambda numbers: _compare(check, numbers),
        )
        session.finish()
        group.barrier()
    return record


KIB, MIB = 2**10, 2**20
GATHERS = ("ring", "multi-ring", "direct")
LAYERS = ("ring-attention", "zigzag-ring-attention", "tasp")
COMPARED = ("schedule", "pass", "predicted_s", "measured_s", "measured_spread_s", "relative_error")


def _compare(check: Check, numbers: dict[str, object]) -> str | None:
    """Predict schedules from the calibration and measure them, as `validate` does; no limit applies."""
    group = check.group
    assert group is not None, "ranks have joined"
    if group.world_size < 2:
        return "needs 2 ranks"
    layer, repeats = Workload(16384, heads=32, kv_heads=8, head_dim=128, dtype="bf16", mask="full"), 10
    sequences: Sequence[int] = (16384, 65536)
    sizes: Sequence[int] = (MIB, 8 * MIB, 64 * MIB, 448 * MIB)
    if check.quick:
        sequences, sizes, repeats = (16384,), (64 * MIB,), 5
    if not check.on_gpu:
        layer = Workload(256, heads=4, head_dim=16, dtype="fp32", mask="full")
        sequences, sizes, repeats = (256,), (64 * KIB,), 2
    questions: list[tuple[Work, Sequence[str], AttentionOptions]]
    questions = [(size, GATHERS, AttentionOptions()) for size in sizes]
    for sequence in sequences:
        full = replace(layer, sequence=sequence)
        questions.append((full, (LAYERS[0], LAYERS[2]), AttentionOptions("both")))
        questions.append((replace(full, mask="causal"), LAYERS, AttentionOptions("both")))
    topology, calibrated = check.machine.topology, check.calibrate().machine
    nominal = Machine(topology if check.on_gpu else calibrated.topology)
    rows = numbers["predicted_and_measured"] = list[dict[str, object]]()
    for work, names, options in questions:
        real = isinstance(work, Workload)
        trials = Trials(group.ranks, work, options, INSTANT, real, calibrated, nominal, repeats, "auto", check.progress)
        schedules = [each for name in names for each in build_schedules(name, topology, work, options=options)]
        about = f"{work.sequence} positions, {work.mask}" if isinstance(work, Workload) else f"{work} bytes"
        for run in trials.run_all(schedules):
            row = {"pass": ""} | run.to_dict()
            rows.append({"work": about} | {name: row[name] for name in COMPARED})
    return None


def gpu_check_one(
    machine: MachineLike | None = None,
    *,
    ranks: int | None = None,
    schedules: Sequence[str] = (),
    seed: int = 0,
    quick: bool = False,
    minutes: float | None = None,
    output: Path | str = "gpu-check",
    progress: ProgressCallback = no_progress,
    show: Show = lambda record: None,
    tests: Sequence[str] = ON_ONE_DEVICE,
) -> Record:
    """Check the runtime with all ranks on one device, this process's GPU or else the processor; returns the record.

    Steps that fail do not end the check: none needs another one. They are in the record.

    Parameters
    ----------
    machine, ranks : a machine, or so many ranks that are a full mesh; by default 4.
    schedules : names of those to run; by default all.
    seed : of the orders of ranks; equal seeds give equal orders on a host.
    minutes : measure, in this time, what one GPU settles of predictions (`tasp_lab.validation.measurements`), before
        the tests, of which none begins later; None measures nothing and has no limit.
    quick, output, progress, show, tests : see `gpu_check`; the record is shown when Ctrl-C ends the check.

    Raises what `gpu_check` raises but for torchrun; `ScheduleError` for an unknown schedule; and `RunError` for fewer
    than 2 ranks, a negative seed, and measurements without a GPU or without time.
    """
    if ranks is not None and not 2 <= ranks <= 64:
        raise RunError(f"--ranks: {ranks}, expected 2 to 64")
    if seed < 0:
        raise RunError(f"--seed: {seed}, expected 0 or more")
    device = the_device()
    if minutes is not None and not minutes > 0:
        raise RunError(f"--minutes: {minutes:g}, expected more than 0")
    if minutes is not None and device.type != "cuda":
        raise RunError(
            "--measure: needs a GPU, and torch sees none here; without it, --one checks the runtime on the CPU"
        )
    chosen = wires(f"full-mesh:{ranks or DEFAULT_RANKS}" if machine is None else machine)
    name, n = chosen.topology.name, chosen.topology.world_size
    if ranks is not None and n != ranks:
        raise RunError(f"{name} has {n} ranks, but --ranks is {ranks}: give one of them")
    if n < 2:
        raise RunError(f"{name} has one rank, expected 2 or more")
    by_kind([each for each in schedules if each not in COLLECTIVES], ["softmax", "linear"])
    folder, files = Path(output), _test_files(tests)
    check_folder(folder)
    check = Check(device, chosen, quick, schedules=tuple(schedules), seed=seed, progress=progress)
    session = Session(check, Record(name, n, f"loopback, {device.type}", quick), folder, show)
    session.begin("environment", "The driver or torch cannot use the GPU; look at nvidia-smi.")
    session.numbers["environment"] = {**host_environment(), "device": device_name(device), **gpu_libraries()}
    session.end("passed")
    try:
        if minutes is not None:
            began_s, tables, shares = time.monotonic(), Tables(folder, device, name), 0.0
            session.ends_s = began_s + 60 * minutes
            for each in MEASUREMENTS:  # what one does not need of its time is left to the next
                shares += each.minutes / DEFAULT_MINUTES
                ends_s = began_s + 60 * minutes * shares
                session.run(
                    each.name, "The libraries differ from those we read; send the record.",
                    lambda numbers, each=each, ends_s=ends_s: measure(each, tables, ends_s, progress, numbers),  # type: ignore[misc]
                )  # fmt: skip
        session.run_tests(files)
        session.run(
            "kernel times", "The GPU is shared or too hot.", lambda numbers: _time_kernels(check, folder, numbers)
        )
    except KeyboardInterrupt:
        session.report(End("interrupted", "interrupted"))
        raise
    return session.finish()


def _time_kernels(check: Check, folder: Path, numbers: dict[str, object]) -> str | None:
    """Write a table of kernel times, which ``calibrate --kernels`` reads."""
    if not check.on_gpu:
        return "needs a GPU"
    table = measured_table(check.progress)
    write_whole(folder / TABLE_NAME, table.encode())
    numbers |= {"table": TABLE_NAME, "rows": table.count("\n") - table.count("#") - 1}
    return None
