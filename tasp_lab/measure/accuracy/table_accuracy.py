"""What every kind of table has in common: its machine, rows with errors, and their summary."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Parameter, read_constants
from tasp_lab.machines.profile import at_provider, load_profile, member, profile_names
from tasp_lab.measure.fit.cases import how_to_name, is_whole_node, suggested_profile
from tasp_lab.measure.readers import AnyTable, KernelTable, LayerTable, MeasuredTable
from tasp_lab.measure.readers.table import profile_beside
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.paired import Setting

Kind = Literal["collective", "layer", "kernel"]
Regime = Literal["gpu-bound", "host-bound", "whole-model"]
"""What the time of a layer is spent on: the GPU and its links; the host, which launches; or more than attention."""

Errors = np.ndarray[tuple[int], np.dtype[np.float64]]

CLOSE = (0.05, 0.15)
"""Errors up to these count as close: `within_5` and `within_15`."""


class Costs(NamedTuple):
    """What decisions need of a layer beside its time: of all passes, and the mean of all packings.

    Attributes
    ----------
    exposed_share : the share of the predicted time that computing does not hide.
    bytes_per_rank : the most that a rank sends.
    steps : of the schedules.
    link_bytes_per_s : the bandwidth of the slowest link.
    setting : where schedules are compared.
    rate_variance : of the logarithm of the time, by the interval of the kernel's rate; 0 for a rate from another GPU,
        whose width comes on top of the errors of layers.
    layouts : what it is a measurement of, with its stack (`tasp_lab.prediction.paired.layouts_of`).
    """

    exposed_share: float
    bytes_per_rank: float
    steps: float
    link_bytes_per_s: float
    setting: Setting
    rate_variance: float = 0.0
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredRow:
    """A measured time beside its prediction, in seconds; None where there is none.

    `reason` is why it does not count, empty if it does. `shape` are its columns, and what it was predicted as. `work`
    is what rows share that do the same, and `schedule` how a row does it: rows of one `work` may be ranked. The
    residual of its `interval` is without the source of the table, or without its provider. Only layers have a `regime`
    and `costs`. Only rows of collectives have a `size_bytes`, and `in_sample_s`: collectives are predicted without
    constants from tables of the same system, and this is the prediction with them, if there are any.
    """

    measured_s: float | None
    predicted_s: float | None
    reason: str = ""
    regime: Regime | None = None
    shape: Mapping[str, object] = field(default_factory=dict)
    work: tuple[object, ...] = ()
    schedule: str = ""
    interval: Interval | None = None
    costs: Costs | None = None
    size_bytes: int = 0
    in_sample_s: float | None = None

    @property
    def in_scope(self) -> bool:
        """Whether its error counts."""
        return not self.reason and self.relative_error is not None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one; None without either."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s is not None and self.measured_s else None

    @property
    def at_median(self) -> MeasuredRow:
        """The row with the median of its interval as what is predicted; itself without one."""
        return self if self.interval is None else replace(self, predicted_s=self.interval.median_s)


def errors_of(rows: Sequence[MeasuredRow]) -> Errors:
    """Relative errors of the rows that count, an array (rows,)."""
    return np.array([error for row in rows if row.in_scope and (error := row.relative_error) is not None])


def is_inside(row: MeasuredRow) -> bool | None:
    """Whether the measured time of a row is inside its interval; None without either."""
    if row.interval is None or row.measured_s is None:
        return None
    return row.interval.low_s <= row.measured_s <= row.interval.high_s


@dataclass(frozen=True)
class TableAccuracy:
    """One table; `reason` it is out of scope, if it is, and the `dominant_rule`: the largest part of the time.

    Of a table of layers, `ranking_right` is the share of its `ranking_groups`, measured groups of the same work, whose
    fastest schedule is predicted to be the fastest; see `tasp_lab.measure.accuracy.layer`.
    """

    table: AnyTable
    reason: str
    rows: tuple[MeasuredRow, ...]
    dominant_rule: str = ""
    ranking_right: float | None = None
    ranking_groups: int = 0

    @property
    def kind(self) -> Kind:
        """Collective, layer or kernel."""
        if isinstance(self.table, LayerTable):
            return "layer"
        return "kernel" if isinstance(self.table, KernelTable) else "collective"

    @property
    def label(self) -> str:
        """The table in a picture."""
        name = Path(self.table.name).name.replace(".csv", "")
        return f"{name}: {self.what}" + f" on {self.profile}" * bool(self.profile)

    @property
    def profile(self) -> str | None:
        """The machine that the table names."""
        return self.table.headers.get("profile") or None

    @property
    def what(self) -> str:
        """What was measured, in a word or two."""
        return str(getattr(self.table, "collective", None) or f"{self.kind}s")

    @property
    def in_scope(self) -> bool:
        """Whether its errors count."""
        return not self.reason and len(self.errors) > 0

    @property
    def errors(self) -> Errors:
        """Relative errors of the rows that count, an array (rows,)."""
        return errors_of(self.rows)

    @property
    def inside(self) -> float | None:
        """The share of rows that count whose interval holds the measured time; None without intervals."""
        are_inside = [each for row in self.rows if row.in_scope and (each := is_inside(row)) is not None]
        return sum(are_inside) / len(are_inside) if are_inside else None

    @property
    def left_out(self) -> Mapping[str, int]:
        """The reasons why rows do not count, and how many rows each has; most frequent first."""
        return dict(Counter(row.reason for row in self.rows if row.reason).most_common())

    def to_dict(self) -> dict[str, object]:
        """The table for a script; errors are null where there is nothing to compare."""
        table, of_collective = self.table, dict[str, object]()
        if self.kind == "collective":
            errors = abs(errors_of([replace(row, predicted_s=row.in_sample_s or row.predicted_s) for row in self.rows]))
            of_collective = {
                "system": table.headers.get("system") or None,
                "library": table.headers.get("library") or None,
                "mean_relative_error_in_sample": float(errors.mean()) if len(errors) else None,
            }
        return {
            "file": table.name,
            "kind": self.kind,
            "profile": self.profile,
            "collective": getattr(table, "collective", None),
            "ranks": getattr(table, "ranks", None),
            "source": table.headers.get("source") or None,
            "in_scope": self.in_scope,
            "reason": self.reason,
            **summary(self.errors),
            "dominant_rule": self.dominant_rule or None,
            "inside": self.inside,
            "ranking_right": self.ranking_right,
            "ranking_groups": self.ranking_groups if self.kind == "layer" else None,
            "regimes": {name: {"rows": len(found), **summary(found)} for name, found in self.by_regime().items()},
            "rows": [row_dict(row) for row in self.rows],
            **of_collective,
        }

    def by_regime(self) -> dict[Regime, Errors]:
        """The errors of each regime of layers, of all rows with a prediction, whether they count or not."""
        errors_of: dict[Regime, list[float]] = {}
        for row in self.rows:
            if row.regime is not None and (error := row.relative_error) is not None:
                errors_of.setdefault(row.regime, []).append(error)
        return {name: np.array(errors) for name, errors in errors_of.items()}


def row_dict(row: MeasuredRow) -> dict[str, object]:
    """A row for a script."""
    return {
        **row.shape,
        "measured_s": row.measured_s,
        "predicted_s": row.predicted_s,
        "relative_error": row.relative_error,
        "time_median_s": None if row.interval is None else row.interval.median_s,
        "time_low_s": None if row.interval is None else row.interval.low_s,
        "time_high_s": None if row.interval is None else row.interval.high_s,
        "in_scope": row.in_scope,
        "reason": row.reason,
        "regime": row.regime,
    }


def summary(errors: Errors) -> dict[str, float | None]:
    """Mean, median, 90th percentile and worst of absolute errors, their mean with signs, and the shares within `CLOSE`.

    >>> summary(np.array([0.01, -0.07]))["within_5"]
    0.5
    """
    if not len(errors):
        return dict.fromkeys(_SUMMARY)
    size = abs(errors)
    values = (size.mean(), np.median(size), np.quantile(size, 0.9), size.max(), errors.mean(),
              *((size <= limit).mean() for limit in CLOSE))  # fmt: skip
    return dict(zip(_SUMMARY, map(float, values), strict=True))


_SUMMARY = (
    "mean_relative_error", "median_relative_error", "p90_relative_error", "worst_relative_error", "bias",
    "within_5", "within_15",
)  # fmt: skip


def machine_of(table: MeasuredTable, library: str = "auto", *, left_out: bool = False) -> tuple[Machine | None, str]:
    """The machine of a table, or the reason why there is none; an impossible machine does not stop other tables.

    With a header `provider` its network is that of this cloud, or of any, whatever its profile is; a header `library`,
    such as ``nccl==2.28.9``, is its library where `library` is ``auto``. With `left_out` the machine has no constant
    that comes from tables of the same system (`constants_without`).
    """
    library = table.headers.get("library", library) if library == "auto" else library
    try:
        name = at_provider(table.machine, table.headers.get("provider", "")) if table.machine else ""
        machine = member(name, library, str(table.profile)) if name else None
        if machine is None and name in catalogue_names():
            machine = load_machine(name, library=library)
        without = constants_without(table.headers.get("system", "")) if left_out else ()
        if machine is not None and machine.system is not None and without:
            known = machine.parameters
            machine = machine.rebuilt(known.with_parameters(each for each in without if each.name in known))
    except TaspLabError as error:
        return None, reason_of(error)
    if machine is not None and table.headers.get("provider"):
        machine = replace(machine, network="cloud")
    return machine, ""


@cache
def constants_without(system: str) -> tuple[Parameter, ...]:
    """What the family of a measured system would have without its tables; none where no constant is from them.

    ``tasp_lab/measure/left_out/<system>.toml``, made by ``python -m experiments.accuracy.library_constants``.
    """
    file = files("tasp_lab.measure") / "left_out" / f"{system}.toml"
    return read_constants(file.read_bytes()) if system and file.is_file() else ()


def on_profile(table: AnyTable, profile: str | None) -> tuple[AnyTable, str]:
    """A table with its machine, and a note if that is a guess; a table that names its machine stays as it is.

    Parameters
    ----------
    profile : of tables that name none: a machine, or a family, whose size is in the table. Without it, a log of one
        full node has the family of the GPUs that it lists.
    """
    if isinstance(table, KernelTable) or table.profile is not None:
        return table, ""
    if isinstance(table, LayerTable):
        return (
            replace(table, profile=profile, headers={**table.headers, "profile": profile}) if profile else table
        ), ""
    if profile is not None:
        return table.on(f"{profile}-{table.size}" if profile in profile_names() else profile), ""
    guess = suggested_profile(table)
    if not guess or not is_whole_node(table, guess):
        return table, ""
    where = f"{table.ranks} {table.headers['gpu']}"
    return table.on(
        guess
    ), f"{Path(table.name).name}: taken as {guess}, by its {where}; --profile names another machine"


def no_profile(table: MeasuredTable) -> str:
    """Why a table has no machine, and how to name it."""
    if table.profile is None:
        return f"the table does not name its machine, expected {how_to_name(suggested_profile(table))}"
    near = difflib.get_close_matches(table.profile, [*profile_names(), *catalogue_names()], n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else ","
    return (
        f"there is no profile {table.profile!r}{hint} expected one of {', '.join(profile_names())} with a size, like "
        "h100-2x8, a machine of the catalogue, like l20-8-pcie, or a file, like my.toml:2x8"
    )


@cache
def machine_for(profile: str, gpus: int, nodes: int, folder: Path | None = None) -> Machine:
    """The machine of a row: the member of a family with so many nodes and GPUs, or the machine that is named.

    A file is found in `folder`, too, which is that of the table. Raises `TaspLabError` if there is none, and for
    another number of GPUs.

    >>> machine_for("h100", 16, 2).topology.name
    'h100-2x8'
    """
    machine = _named(profile if folder is None else profile_beside(profile, folder), gpus, nodes)
    if machine.topology.world_size != gpus:
        raise TaspLabError(f"{profile} has {machine.topology.world_size} ranks, the row {gpus} GPUs")
    return machine


def _named(profile: str, gpus: int, nodes: int) -> Machine:
    if profile in profile_names() or profile.endswith(".toml"):
        size = f"{nodes}x{gpus // nodes}" if nodes > 1 else str(gpus)
        return load_profile(profile).machine(size, f"{Path(profile).stem}-{size}")
    try:
        return load_machine(profile)
    except TaspLabError:
        raise TaspLabError(f"there is no profile {profile!r}") from None


def machines_of(compared: TableAccuracy) -> dict[str, Machine]:
    """The machines that predicted a table, by name."""
    if isinstance(compared.table, MeasuredTable):
        machine = machine_of(compared.table)[0] if compared.rows else None
        return {} if machine is None else {str(compared.profile): machine}
    machines = {}
    for row in compared.rows:
        if row.predicted_s is not None and isinstance(compared.table, LayerTable):
            where = (str(row.shape["profile"]), int(str(row.shape["gpus"])), int(str(row.shape["nodes"])))
            machine = machine_for(*where, Path(compared.table.name).parent)
            machines[machine.topology.name] = machine
    return machines


def reason_of(error: TaspLabError) -> str:
    """An error as the reason why a row has no prediction."""
    return first_line(error)
