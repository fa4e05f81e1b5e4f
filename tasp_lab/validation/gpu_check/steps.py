"""The steps of a check in their order, what each proves, and what its failure means."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.calibration import Calibration
from runtime.gpu_check.group import CheckedGroup
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.machines.machine import Machine
from tasp_lab.validation.gpu_check.record import Numbers, StepResult, Verdict
from tasp_lab.validation.gpu_check.sizes import Sizes

NEEDS_GPU = "needs a GPU"
NOT_JUDGED = f"{NEEDS_GPU}: the numbers are those of this host, and no limit applies to them"


@dataclass
class Context:
    """What steps work with, and what earlier steps have found.

    `ceilings` are the library's own times in seconds by operation and size, `calibration` is that of this group.
    """

    group: CheckedGroup
    machine: Machine
    sizes: Sizes
    progress: ProgressCallback = no_progress
    ceilings: dict[tuple[str, int], float] = field(default_factory=dict)
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Outcome:
    """What a step has found on this rank; it failed if there is a `failure`. Numbers are taken from rank 0."""

    numbers: Numbers
    failure: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Step:
    """One step; `run` is called on all ranks at once. An error that it raises on one rank ends the whole check."""

    number: int
    name: str
    proves: str
    if_it_fails: str
    run: Callable[[Context], Outcome]
    min_ranks: int = 1

    def result(self, verdict: Verdict, numbers: Numbers, seconds: float, message: str) -> StepResult:
        """The result of this step."""
        return StepResult(
            self.number, self.name, self.proves, verdict, numbers, seconds, message, self.if_it_fails
        )  # fmt: skip


def judged(context: Context, numbers: Numbers, failures: Sequence[str]) -> Outcome:
    """An outcome with limits, which apply on GPUs only; `failures` are those that are exceeded."""
    if not context.group.on_gpu:
        return Outcome(numbers, skipped=NOT_JUDGED)
    return Outcome(numbers, failure="; ".join(failures))


def run_step(step: Step, context: Context) -> StepResult:
    """Run a step on all ranks; the same verdict on all of them."""
    began_s = time.perf_counter()
    if context.group.world_size < step.min_ranks:
        return step.result("skipped", {}, 0.0, f"needs {step.min_ranks} ranks")
    own = step.run(context)
    outcomes = context.group.gather(own)
    failures = [f"rank {rank}: {each.failure}" for rank, each in enumerate(outcomes) if each.failure]
    seconds, numbers = time.perf_counter() - began_s, outcomes[0].numbers
    if failures:
        return step.result("failed", numbers, seconds, failures[0])
    if outcomes[0].skipped:
        return step.result("skipped", numbers, seconds, outcomes[0].skipped)
    return step.result("passed", numbers, seconds, "")
