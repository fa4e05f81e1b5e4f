"""What a change of the machine or of the job buys a plan, and what would make a layout fit where none does.

for change in changes(asked, setting, best, "h100-4x8"):
    print(bought(change, best, steps, rankings).record)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from operator import itemgetter, mul
from typing import Any, NamedTuple

from tasp_lab.core.choices import Checkpointing, MatrixDtype
from tasp_lab.core.errors import TaspLabError, WorkloadError, first_line, of_type
from tasp_lab.machines.change import has_nics
from tasp_lab.machines.compute import KernelCompute, with_kernel
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, kernel_names
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.machines.stack import DEFAULT_STACK, load_stack
from tasp_lab.planning.candidates import CHECKPOINTINGS, candidates, domain_of
from tasp_lab.planning.search import Rankings, Search, Setting, promise, simulated
from tasp_lab.prediction.inputs import ComputeLike, MachineLike, chosen_machine, parse_compute
from tasp_lab.prediction.settings import MachineSettings
from tasp_lab.prediction.step_results import LOGIT_CHUNKS, StepPrediction
from tasp_lab.prediction.training_step.layout import Layout, StepPlan, check_matrix_dtype, describe
from tasp_lab.prediction.training_step.rates import of_machine, step_rates, with_memory
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.models.model import Model

SIMULATIONS = 6
"""Layouts that are simulated unless bounds exclude all others before."""

CHANGE_SIMULATIONS = 1
"""Layouts that are simulated for each change, beside the recommended one."""

MOST_DOUBLED = 512
"""Machines of more GPUs are not doubled any more to find what would fit."""

MOST_SIMULATED = 128
"""On more GPUs twice the nodes are not simulated where one more node has no layout."""


@dataclass(frozen=True)
class Job:
    """What is trained, beside the length of a sequence: what a study of plans asks, see `tasp_lab.planning.plan.plan`.

    Raises `WorkloadError` for numbers below 1 and unknown choices.
    """

    model: Model
    batch_tokens: int
    checkpointing: Checkpointing | None = None
    logit_chunks: int = 1
    offload: bool = False
    matrix_dtype: MatrixDtype = "bf16"
    simulations: int | None = SIMULATIONS

    def __post_init__(self) -> None:
        check_numbers(batch_tokens=self.batch_tokens, simulations=self.simulations)
        Layout(checkpointing=self.checkpointing or "full", logit_chunks=self.logit_chunks)
        if not isinstance(self.offload, bool):
            raise WorkloadError(of_type("offload", self.offload, "true or false"))
        check_matrix_dtype(self.matrix_dtype)


def check_numbers(**named: int | None) -> None:
    """Raise `WorkloadError` for a number below 1."""
    for name, value in named.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise WorkloadError(f"{name.replace('_', ' ')}: {value}, expected 1 or more")


@dataclass(frozen=True)
class Asked:
    """A job on any machine: `settings` are those of the machine, `gpu.memory` among the overrides is one of the rates.

    See `tasp_lab.planning.plan.plan` for the others.
    """

    job: Job
    sequence: int
    schedules: tuple[str, ...] | None
    matrix_rate: ComputeLike | None
    settings: MachineSettings

    def but(self, **changes: Any) -> Asked:
        """This question about another job: `changes` are fields of `Job`."""
        return replace(self, job=replace(self.job, **changes))

    def on(self, machine: MachineLike) -> Setting:
        """The machine with its overrides, and its rates."""
        overrides = self.settings.overrides
        found = chosen_machine(machine, replace(self.settings, overrides=of_machine(overrides)))
        rate = parse_compute(self.matrix_rate)
        rates = step_rates(found, self.job.matrix_dtype, rate if isinstance(rate, float) else None)
        return Setting(found, with_memory(rates, overrides), self.schedules, self.job.matrix_dtype, self.matrix_rate)

    def layouts(self, machine: Machine) -> list[StepPlan]:
        """All layouts on a machine, run by the software of its stack."""
        job, topology, software = self.job, machine.topology, load_stack(machine.stack or DEFAULT_STACK).step
        chosen = CHECKPOINTINGS if job.checkpointing is None else (job.checkpointing,)
        found = candidates(job.model, self.sequence, job.batch_tokens, topology.world_size, domain_of(topology),
                           checkpointings=chosen, matrix_dtype=job.matrix_dtype, logit_chunks=job.logit_chunks,
                           offload=job.offload)  # fmt: skip
        return [replace(each, software=software) for each in found]


class Change(NamedTuple):
    """A change: the setting with it, and the layouts there, or the reason why there is none.

    `keeps_times`: whether layouts that were simulated as is take as long with it.
    """

    name: str
    setting: Setting | None
    plans: Sequence[StepPlan] = ()
    reason: str = ""
    keeps_times: bool = False


class Bought(NamedTuple):
    """What a change buys: the fastest step with it, or the reason why there is none.

    `share` is its tokens per second and GPU over those as is; 0 without one.
    """

    change: str
    step: StepPrediction | None
    share: float = 0.0
    reason: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """The object of ``--json``."""
        layout = None if self.step is None else describe(self.step.plan)
        per_gpu = None if self.step is None else self.step.tokens_per_s_per_gpu
        return {"change": self.change, "layout": layout, "tokens_per_s_per_gpu": per_gpu,
                "over_as_is": self.share or None, "reason": self.reason}  # fmt: skip


def changes(asked: Asked, setting: Setting, best: StepPrediction, name: str) -> Iterator[Change]:
    """More memory, logits in parts, faster NICs, a faster kernel, one node more: those that the machine `name` has."""
    machine, rates = setting.machine, setting.rates
    if rates.capacity_bytes is not None:
        roomy = replace(setting, rates=replace(rates, capacity_bytes=2 * rates.capacity_bytes))
        yield Change("memory=x2", roomy, asked.layouts(machine), keeps_times=True)
    if best.plan.layout.logit_chunks == 1 and best.memory.logits > best.memory.total / 20:
        plans = asked.but(logit_chunks=LOGIT_CHUNKS).layouts(machine)
        yield Change(f"logits in {LOGIT_CHUNKS} parts", setting, plans, keeps_times=True)
    if has_nics(machine):
        faster = replace(setting, machine=overridden(machine, ["nic.bandwidth=x2"]))
        yield Change("nic.bandwidth=x2", faster, asked.layouts(machine))
    if (faster_kernel := _faster_kernel(setting, best)) is not None:
        kernel, other = faster_kernel
        yield Change(f"kernel {kernel}", other, asked.layouts(machine))
    for nodes in (lambda count: count + 1), (lambda count: 2 * count):
        if not (larger := more_nodes(name, nodes)):
            return
        try:
            other = asked.on(larger)
            plans = asked.layouts(other.machine)
        except TaspLabError as error:
            reason = first_line(error)
        else:
            fits, _ = Search(other).candidates(plans)
            if fits:
                yield Change(larger, other, [each.plan for each in fits])
                return
            reason = "no layout fits" if plans else "no layout divides the batch"
        yield Change(larger, None, reason=reason)
        if machine.topology.world_size > MOST_SIMULATED:
            return


def bought(asked: tuple[Change, StepPrediction, Sequence[StepPrediction], Rankings]) -> Bought:
    """What a change buys over the recommended step; further steps, and rankings of schedules, are those as is."""
    change, best, steps, rankings = asked
    if change.setting is None or not change.plans:
        return Bought(change.name, None, reason=change.reason)
    search = Search(change.setting, CHANGE_SIMULATIONS, rankings=dict(rankings) if change.keeps_times else {})
    known = steps if change.keeps_times else (best,)
    as_is = set(map(asked_plan, known))
    if not change.keeps_times:
        known = search.run(each for each in change.plans if each in as_is).steps
    found = search.run((each for each in change.plans if each not in as_is), known)
    if not found.steps:
        return Bought(change.name, None, reason="no layout fits")
    step = found.fastest
    return Bought(change.name, step, step.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu)


def asked_plan(step: StepPrediction) -> StepPlan:
    """The layout that was asked for, before a schedule and its options were chosen: one of `Asked.layouts`."""
    return replace(step.plan, schedule="", options=AttentionOptions(step.plan.options.passes))


def ways_to_fit(asked: Asked, setting: Setting, name: str) -> Iterator[dict[str, Any]]:
    """What makes a layout fit, the fewest GPUs first: of each number of nodes, by doubling, the fewest options that do,
    until no option is needed.
    """
    options: dict[str, dict[str, Any]] = {}
    if asked.job.logit_chunks < LOGIT_CHUNKS:
        options[f"--logit-chunks {LOGIT_CHUNKS}"] = {"logit_chunks": LOGIT_CHUNKS}
    if not asked.job.offload:
        options["--offload"] = {"offload": True}
    if asked.job.checkpointing is None:
        options["--checkpointing offload"] = {"checkpointing": "offload"}
    ways = [names for count in range(len(options) + 1) for names in combinations(options, count)]
    more, factor = "", 1
    while True:
        for names in ways:
            changed = {key: value for name in names for key, value in options[name].items()}
            fits, _ = Search(setting).candidates(asked.but(**changed).layouts(setting.machine))
            if fits and (more or names):  # else only attention buffers do not fit
                best = min(fits, key=promise)
                change = " ".join([more, *names]).strip()
                yield {"change": change, "layout": describe(best.plan), "memory_bytes": best.memory.total}
                if not names:
                    return
                break
        factor *= 2
        more = more_nodes(name, partial(mul, factor))
        if not more or setting.machine.topology.world_size > MOST_DOUBLED:
            return
        setting = asked.on(more)


def _faster_kernel(setting: Setting, best: StepPrediction) -> tuple[str, Setting] | None:
    """The measured kernel of this GPU with which the recommended step takes least, if it takes less than as it is."""
    machine = setting.machine
    if not isinstance(machine.compute, KernelCompute):
        return None
    faster = []
    for name in kernel_names(str(machine.accelerator)):
        kernel = attention_kernel(str(machine.accelerator), name)
        serves = any(variant.design.key_bytes for variant in kernel.file.variants)  # copies keys into a cache
        if kernel.note or serves:
            continue
        other = replace(setting, machine=with_kernel(machine, name))
        step = simulated((other, best.plan))
        if isinstance(step, StepPrediction) and 1.05 * step.time_s < best.time_s:
            faster.append((step.time_s, name, other))
    return min(faster, key=itemgetter(0))[1:] if faster else None


def more_nodes(name: str, nodes: Callable[[int], int]) -> str:
    """The name of the machine of the same family with other nodes; empty for machines of no family.

    >>> more_nodes("h100-4x8", lambda count: count + 1), more_nodes("h100-8", lambda count: 2 * count)
    ('h100-5x8', 'h100-2x8')
    >>> more_nodes("gb200-2x1x4", lambda count: count + 1), more_nodes("full-mesh:8", lambda count: count + 1)
    ('gb200-3x1x4', '')
    """
    match = re.fullmatch(r"([a-z][a-z0-9_]*)-(?:(\d+)x)?((?:1x)?\d+)((?:-rails)?)", name)
    if match is None:
        return ""
    family, count, ranks, rest = match.groups()
    return f"{family}-{nodes(int(count or 1))}x{ranks}{rest}"
