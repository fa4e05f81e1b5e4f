"""The machines of measured tables."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import cache
from pathlib import Path

from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.profile_files import listed_members, load_profile, member, profile_names
from tasp_lab.measure.accuracy.judged import TableAccuracy
from tasp_lab.measure.fit.cases import how_to_name, is_whole_node, suggested_profile
from tasp_lab.measure.readers import AnyTable, KernelTable, LayerTable, MeasuredTable
from tasp_lab.measure.readers.table import profile_beside


def machine_of(table: MeasuredTable, library: str = "auto") -> tuple[Machine | None, str]:
    """The machine of a table, or the reason why there is none; an impossible machine does not stop other tables.

    With a header `provider` its network is that of a cloud, whatever its profile says.
    """
    try:
        machine = member(table.machine, library, str(table.profile)) if table.machine else None
    except TaspLabError as error:
        return None, reason_of(error)
    if machine is not None and table.headers.get("provider"):
        machine = replace(machine, network="cloud")
    return machine, ""


def on_profile(table: AnyTable, profile: str | None) -> tuple[AnyTable, str]:
    """A table with its machine, and a note if that is a guess; a table that names its machine stays as it is.

    Parameters
    ----------
    profile : of tables that name none: a machine, or a family whose size the table tells. Without it, a log of one
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
    near = difflib.get_close_matches(table.profile, [*profile_names(), *listed_members()], n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else ","
    return (
        f"there is no profile {table.profile!r}{hint} expected one of {', '.join(profile_names())} with a size, like "
        "h100-2x8, or a file, like my.toml:2x8"
    )


@cache
def machine_for(profile: str, gpus: int, nodes: int, folder: Path | None = None) -> Machine:
    """The machine of a row: the member of a family with so many nodes and GPUs, or the machine that is named.

    A file is found in `folder`, too, which is that of the table. Raises `TaspLabError` if there is none, and for
    another number of GPUs.

    >>> machine_for("h100", 16, 2).topology.name
    'h100-2x8'
    """
    found = _named(profile if folder is None else profile_beside(profile, folder), gpus, nodes)
    if found.topology.world_size != gpus:
        raise TaspLabError(f"{profile} has {found.topology.world_size} ranks, the row {gpus} GPUs")
    return found


def _named(profile: str, gpus: int, nodes: int) -> Machine:
    if profile in profile_names() or profile.endswith(".toml"):
        size = f"{nodes}x{gpus // nodes}" if nodes > 1 else str(gpus)
        found = load_profile(profile).member(size, f"{Path(profile).stem}-{size}")
        assert found is not None, "such a size is one"
        return found
    try:
        return load_machine(profile)
    except TaspLabError:
        raise TaspLabError(f"there is no profile {profile!r}") from None


def machines_of(judged: TableAccuracy) -> dict[str, Machine]:
    """The machines that predicted a table, by name."""
    if isinstance(judged.table, MeasuredTable):
        machine = machine_of(judged.table)[0] if judged.rows else None
        return {} if machine is None else {str(judged.profile): machine}
    found = {}
    for row in judged.rows:
        if row.predicted_s is not None and isinstance(judged.table, LayerTable):
            where = (str(row.shape["profile"]), int(str(row.shape["gpus"])), int(str(row.shape["nodes"])))
            machine = machine_for(*where, Path(judged.table.name).parent)
            found[machine.topology.name] = machine
    return found


def reason_of(error: TaspLabError) -> str:
    """An error as the reason why a row has no prediction."""
    return first_line(error)
