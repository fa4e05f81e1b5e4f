"""The accuracy report of many tables, of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import overload

from tasp_lab.core.errors import TableError
from tasp_lab.core.progress import CountCallback, ProgressCallback, no_progress, on_one_line
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import FEW_SAMPLES, NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.collective import judge_collective
from tasp_lab.measure.accuracy.judged import TableAccuracy
from tasp_lab.measure.accuracy.kernel import judge_kernel
from tasp_lab.measure.accuracy.layer import LayerJudge
from tasp_lab.measure.accuracy.machines import machines_of, on_profile
from tasp_lab.measure.accuracy.tables import parts_of
from tasp_lab.measure.coverage import Coverage, coverage_of, coverage_parts
from tasp_lab.measure.fit.cases import choose
from tasp_lab.measure.inputs import table_inputs
from tasp_lab.measure.readers import AnyTable, KernelTable, LayerTable, find_all_tables
from tasp_lab.prediction.provenance import Provenance, machine_constants, machine_inputs


def own_tables() -> Path:
    """The folder of the tables that come with tasp-lab."""
    return Path(str(files("tasp_lab.measure") / "tables"))


@dataclass(frozen=True, repr=False)
class AccuracyReport(Report, Sequence[TableAccuracy]):
    """Measured tables beside their predictions, a sequence of `TableAccuracy`; `notes` are about guessed machines."""

    tables: tuple[TableAccuracy, ...]
    provenance: Provenance
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> TableAccuracy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TableAccuracy, ...]: ...
    def __getitem__(self, index: int | slice) -> TableAccuracy | tuple[TableAccuracy, ...]:
        return self.tables[index]

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def median_relative_error(self) -> float | None:
        """The median of the mean errors of the tables in scope; None without any."""
        means = [float(abs(table.errors).mean()) for table in self.tables if table.in_scope]
        return median(means) if means else None

    @property
    def coverage(self) -> tuple[Coverage, ...]:
        """How many measured times intervals hold, regime by regime."""
        return coverage_of(self.tables)

    def to_dict(self) -> dict[str, object]:
        return {
            "median_relative_error": self.median_relative_error,
            "coverage": [each.to_dict() for each in self.coverage],
            "tables": [table.to_dict() for table in self.tables],
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per table."""
        return [flat(table.to_dict()) for table in self.tables]

    def parts(self) -> list[Part]:
        return [*parts_of(self.tables), *coverage_parts(self.coverage), *self.notes]


def accuracy(
    *paths: Path | str,
    profile: str | None = None,
    sampling: Sampling = FEW_SAMPLES,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
) -> AccuracyReport:
    """Compare measured tables with their predictions.

    Parameters
    ----------
    paths : CSV tables of collectives, layers or kernels, logs of nccl-tests, and folders of them; the tables of
        tasp-lab if none is given.
    profile : the machine of tables that do not name theirs, like ``h100-8``, ``h100`` (the size is then that of the
        table) or ``my.toml:2x8``; without it a log of one full node has the family of the GPUs that it lists.
    sampling : how many samples of constants intervals are made of, see `tasp_lab.prediction.uncertainty`.
    progress : called with the name of each complete table, if there are several.
    count : called instead with the number of each of these tables and its name.

    Raises `TableError` for a table that cannot be read, and if no table can be compared, and `ProfileError` for an
    unknown profile.
    """
    if profile is not None and ".toml" not in profile:
        choose(profile)
    files = [Path(path) for path in paths]
    named = [on_profile(table, profile) for table in find_all_tables(files or [own_tables()])]
    found, layers, tables = [table for table, _ in named], LayerJudge(sampling), []
    count = count or (lambda done, total, name: progress(name) if name else None)
    is_whole = [not getattr(table, "reason", "") for table in found]
    total = sum(is_whole)
    for number, table in enumerate(found):
        if total > 1 and is_whole[number]:
            count(sum(is_whole[:number]), total, Path(table.name).name)
        tables.append(judge(table, layers, sampling))
    count(total, total, "")
    if not any(table.rows for table in tables):
        raise TableError(_nothing_to_compare(files, tables))
    return AccuracyReport(tuple(tables), _provenance(tables), tuple(note for _, note in named if note))


def judge(table: AnyTable, layers: LayerJudge | None = None, sampling: Sampling = NO_SAMPLES) -> TableAccuracy:
    """A table beside its prediction, if there is one; `layers` knows what was simulated before."""
    if isinstance(table, LayerTable):
        return (layers or LayerJudge(sampling)).judge(table)
    return judge_kernel(table, sampling) if isinstance(table, KernelTable) else judge_collective(table, sampling)


def _provenance(tables: Sequence[TableAccuracy]) -> Provenance:
    """The tables and their machines are the inputs; constants have the names of their machines before them."""
    machines: dict[str, Machine] = {}
    for each in tables:
        for name, machine in machines_of(each).items():
            machines[_unused(name, machine, machines)] = machine
    inputs = {
        "tables": [table_inputs(each.table) for each in tables],
        "machines": {name: machine_inputs(machine, compute=False) for name, machine in machines.items()},
    }
    families = {machine.parameters: name.partition("-")[0] for name, machine in machines.items()}
    constants = [each for stated, name in families.items() for each in machine_constants(stated.values(), f"{name}: ")]
    return Provenance(inputs, tuple(constants), ("array", "simpy"))


def _unused(name: str, machine: Machine, machines: Mapping[str, Machine]) -> str:
    """A name for one more machine: profiles in several folders may have the same one."""
    is_other = machines.get(name, machine) != machine
    return f"{name} ({len(machines) + 1})" if is_other else name


def _nothing_to_compare(paths: Sequence[Path], tables: Sequence[TableAccuracy]) -> str:
    if not tables:
        names = ", ".join(map(str, paths))
        return f"{names}: no table in it, expected CSV tables (.csv) or logs of nccl-tests (.log, .out, .txt)"
    others = f" (and {len(tables) - 1} other tables)" * (len(tables) > 1)
    return on_one_line(f"{tables[0].table.name}: nothing to compare: {tables[0].reason}{others}")
