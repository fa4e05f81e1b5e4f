"""How often ``tasp-lab check`` is right: of public logs whose verdict is known, and of logs with a planted cause.

``python -m experiments.tables.checks`` writes ``experiments/results/checks.md``. Public logs and their verdicts are in
``experiments/logs``, the source in the head of each. Planted logs are predictions times errors drawn from those of the
machine's class (`tasp_lab.measure.check.errors.Errors`), with a severity drawn from the range of the cause.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import RESULTS, markdown_table, write_page
from tasp_lab.core.errors import TaspLabError
from tasp_lab.measure.accuracy.collective import evaluate_collective
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.check import check
from tasp_lab.measure.check.causes import Cause, Effect, effects_on
from tasp_lab.measure.check.diagnosis import Diagnosis, Observation, diagnose, diagnosis_of
from tasp_lab.measure.check.predictions import Predictions
from tasp_lab.measure.profiles import machine_named, machine_of
from tasp_lab.measure.readers import find_tables
from tasp_lab.schedules.collectives.kinds import NcclTestsName

LOGS = Path(__file__).parents[1] / "logs"

MACHINES = ("h100-8", "h100-2x8", "a100-8", "a100-2x8", "b200-8", "h200-2x8", "mi300x-8", "mi300x-2x8")
COLLECTIVES: Sequence[NcclTestsName] = ("all_gather", "all_reduce", "alltoall")
SIZES = [2**power for power in range(16, 34)]
HEALTHY_LOGS, SEVERITIES = 100, 3
"""Healthy logs of each machine and collective; logs of each cause, with a severity drawn for each."""

KNOWN: Mapping[str, tuple[str, Sequence[str]]] = {
    "20_": ("a100-2", ["link.bandwidth=56.25GB/s"]),
    "28_": ("a100-2", ["link.bandwidth=100GB/s"]),
    "39_": ("rtx4090-4-pcie", []),
    "40_": ("rtx4090d-8-pcie", []),
    "43_": ("a100-2x1", ["nic.bandwidth=25GB/s"]),
    "44_": ("a100-2x1", ["nic.bandwidth=25GB/s"]),
    "46_": ("l20-8-pcie", []),
    "56_": ("a100-2x1", ["nic.bandwidth=12.5GB/s"]),
    "58_": ("a100-2x1", ["nic.bandwidth=3.125GB/s"]),
}
"""What was passed as ``--machine`` and ``--set`` for machines that tasp-lab has no name for: those with the rate of
NICs or links that the thread states."""

NAMES: Mapping[str, Sequence[str]] = {
    "acs_iommu+ib_split_data": ("ACS or the IOMMU", "queue pairs"),
    "tests_without_mpi": ("MPI=1",),
    "p2p_off_shm": ("P2P is off",),
    "nic_numa_no_gdr": ("far NIC", "GPUDirect"),
    "gdr_env_not_forwarded": ("environment of the others", "GPUDirect"),
    "fabric_across_racks": ("fabric between racks",),
    "channels_qps": ("queue pairs",),
    "nvls_off": ("NVLS is off",),
    "gdr_off": ("GPUDirect",),
}
"""How the causes of ``verdicts.csv`` are called by the command."""


class Judged(NamedTuple):
    """A public log: what was known, what was said, and the place of the cause in the list; 0 if it is not there."""

    file: str
    machine: str
    known: str
    said: str
    cause: str
    place: int
    seconds: float


def public() -> Iterator[Judged]:
    """All public logs."""
    with (LOGS / "verdicts.csv").open() as file:
        for row in csv.DictReader(file):
            machine, overrides = next(
                (each for start, each in KNOWN.items() if row["file"].startswith(start)), (row["machine"], [])
            )
            begin_s = time.process_time()
            try:
                found = check(LOGS / row["file"], machine=machine, overrides=overrides)
                said, causes = str(found.verdict), [str(each["cause"]) for each in found.to_dict()["causes"]]  # type: ignore[attr-defined]
            except TaspLabError as error:
                said, causes = "refused", [str(error)]
            place = next(
                (n for n, each in enumerate(causes, 1) if any(name in each for name in NAMES.get(row["cause"], ()))), 0
            )
            yield Judged(row["file"], machine, row["verdict"], said, row["cause"], place, time.process_time() - begin_s)


MOST_RANKS = 40
"""Larger machines of measured tables take minutes."""


def measured() -> Iterator[tuple[str, Diagnosis]]:
    """The measured tables of tasp-lab, each by its machine without the constants that came from its own system."""
    for table in find_tables([own_tables()]):
        found = evaluate_collective(table)
        if not found.in_scope or table.collective is None:
            continue
        machine = machine_of(table, left_out=True)
        rows = [Observation(table.collective, row.size_bytes, row.measured_s or 0.0)
                for row in found.rows if row.in_scope]  # fmt: skip
        if machine.topology.world_size <= MOST_RANKS:
            yield Path(table.name).name, diagnose(machine, rows)


class Planted(NamedTuple):
    """A planted log: its cause, whether it was called slow, and the places of the effect and the cause."""

    machine: str
    collective: str
    cause: str
    slow: bool
    share: float
    effect_place: int
    cause_place: int


def planted(random: np.random.Generator) -> Iterator[Planted]:
    """All causes on all machines, and healthy logs, whose cause is empty."""
    for name in MACHINES:
        machine = machine_named(name)
        for logs in (*((each,) for each in COLLECTIVES), COLLECTIVES):
            predictions = Predictions(machine, [(collective, size) for collective in logs for size in SIZES])
            errors, collective = predictions.errors_of(range(len(predictions.calls))), " and ".join(logs)
            for error in errors.draw(random, HEALTHY_LOGS):
                found = diagnosis_of(predictions, predictions.expected_s * np.exp(error))
                yield Planted(name, collective, "", found.is_slow, 1.0, 0, 0)
            for effect in effects_on(machine):
                for cause in effect.causes:
                    for error in errors.draw(random, SEVERITIES):
                        if (times_s := _with(predictions, effect, cause, random)) is not None:
                            found = diagnosis_of(predictions, times_s * predictions.middle * np.exp(error))
                            share = float(np.min(predictions.healthy_s / times_s))
                            yield _place(found, name, collective, effect, cause, share)
            print(name, collective, flush=True)


def _with(predictions: Predictions, effect: Effect, cause: Cause, random: np.random.Generator) -> np.ndarray | None:
    """The times with a cause of a random severity, not one of those that are tried; None where nothing changes."""
    tried = [each for each in effect.severities if cause.may_be(each)]
    severity = round(float(np.exp(random.uniform(np.log(min(tried)), np.log(max(tried))))), 4) if tried else None
    version = str(random.choice(effect.versions)) if effect.versions else None
    try:
        changed = effect.on(predictions.machine, severity, version)
    except TaspLabError:
        return None
    found = list(predictions.with_effect_s(effect, changed))
    return found[random.integers(len(found))] if found else None


def _place(found: Diagnosis, machine: str, collective: str, effect: Effect, cause: Cause, share: float) -> Planted:
    effects = list(dict.fromkeys(each.effect.name for each in found.findings))
    causes = [each.cause.name for each in found.findings]
    places = effects.index(effect.name) + 1, causes.index(cause.name) + 1
    return Planted(machine, collective, cause.name, found.is_slow, share, *places)


NOTICEABLE = 0.8
"""Planted causes that leave every size a larger share of its bandwidth are counted apart: predictions err as much."""


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values) / len(values):.0%}" if values else "-"


def _of_cause(cause: str, own: Sequence[Planted]) -> tuple[str, ...]:
    large = [each for each in own if each.share < NOTICEABLE]
    first, first_large = ([each.effect_place <= 2 for each in logs] for logs in (own, large))
    return cause, str(len(own)), _share(first), str(len(large)), _share(first_large), _share([e.slow for e in large])


def main() -> None:
    """Write the page."""
    judged, tables = list(public()), list(measured())
    called = [name for name, found in tables if found.is_slow]
    known = [each for each in judged if each.known != "unclear"]
    slow = [each for each in known if each.known == "slow"]
    right = [each.said == each.known or (each.said == "unclear" and each.known == "healthy") for each in known]
    logs = list(planted(np.random.default_rng(52)))
    together = [each for each in logs if " and " in each.collective]
    logs = [each for each in logs if " and " not in each.collective]
    healthy, faulty = [each for each in logs if not each.cause], [each for each in logs if each.cause]
    joint, joint_healthy = ([each for each in together if bool(each.cause) == wrong] for wrong in (True, False))
    large = [each for each in faulty if each.share < NOTICEABLE]
    summary = [
        ("public logs, verdict right", _share(right), "90 %"),
        ("public slow logs, cause named first", _share([each.place == 1 for each in slow]), "60 %"),
        ("public slow logs, cause among three", _share([0 < each.place <= 3 for each in slow]), "80 %"),
        ("public healthy logs called slow", _share([e.said == "slow" for e in known if e.known == "healthy"]), "0 %"),
        (f"{len(tables)} measured tables called slow: {', '.join(called) or 'none'}", f"{len(called)}", "0"),
        ("planted, effect among the first two", _share([each.effect_place <= 2 for each in faulty]), "90 %"),
        (f"planted, below {NOTICEABLE:.0%}, effect among two", _share([each.effect_place <= 2 for each in large]), ""),
        (f"planted, below {NOTICEABLE:.0%}, cause among three", _share([each.cause_place <= 3 for each in large]), ""),
        (f"planted, below {NOTICEABLE:.0%}, called slow", _share([each.slow for each in large]), ""),
        ("three logs at once, effect among the first two", _share([each.effect_place <= 2 for each in joint]), "90 %"),
        ("three logs at once, cause among three", _share([each.cause_place <= 3 for each in joint]), ""),
        ("three logs at once, healthy called slow", _share([each.slow for each in joint_healthy]), "3 %"),
        ("planted healthy logs called slow", _share([each.slow for each in healthy]), "3 %"),
        ("processor time of a check, median and longest", f"{np.median([e.seconds for e in judged]):.1f} and "
         f"{max(e.seconds for e in judged):.1f} s", "3 s"),
    ]  # fmt: skip
    by_cause = [
        _of_cause(cause, [each for each in faulty if each.cause == cause])
        for cause in dict.fromkeys(each.cause for each in faulty)
    ]
    rows = [
        (each.file, each.machine, each.known, each.said, each.cause, str(each.place or "-"), f"{each.seconds:.1f} s")
        for each in judged
    ]
    write_page(RESULTS / "checks.md", "\n\n".join((
        "# Checks of logs: right and wrong",
        f"{len(judged)} public logs, {len(healthy)} healthy and {len(faulty)} planted slow ones of {len(MACHINES)} "
        f"machines and {len(COLLECTIVES)} collectives. A log that is not clear counts as healthy.",
        markdown_table(("measure", "found", "aim"), summary),
        markdown_table(("planted cause", "logs", "effect among two", f"below {NOTICEABLE:.0%}", "effect among two",
                        "called slow"), by_cause),
        markdown_table(("public log", "machine", "known", "said", "cause", "place", "processor"), rows),
    )))  # fmt: skip


if __name__ == "__main__":
    main()
