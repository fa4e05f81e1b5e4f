"""NCCL's measured constants: those of each generation from one system, and those without each system.

``python -m experiments.accuracy.library_constants`` fits the calls inside one domain of
``tasp_lab/measure/tables/aiconfigurator_one_node.csv`` and writes

- ``tasp_lab/machines/libraries/constants/nccl_<generation>.toml``, from the tables of one system;
- ``tasp_lab/measure/left_out/<system>.toml``, what that generation would have without the tables of that system: from
  others of the generation, and where these are silent the geometric mean of the other generations. By them
  `tasp-lab accuracy` judges the tables of the system.

The rate of rings is the slope between the two largest sizes: for each byte of a shard an AllGather takes
(n - 1) / rate + 2 / copy longer. All others are least squares over relative errors, which a few wild rows do not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import least_squares

import tasp_lab.machines.libraries
import tasp_lab.measure
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.files import write_whole
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.parameters import Parameters, changed
from tasp_lab.machines.profile import load_profile
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.fit.cases import Case, Simulated, cases_of, measured
from tasp_lab.measure.profiles import Choice
from tasp_lab.measure.readers import MeasuredTable, find_tables

CONSTANTS_FOLDER = Path(next(iter(tasp_lab.machines.libraries.__path__))) / "constants"
LEFT_OUT_FOLDER = Path(next(iter(tasp_lab.measure.__path__))) / "left_out"

RINGS = ("base_ll", "link_hop_ll", "ll_channel_rate", "base_ll128", "link_hop_ll128", "base_simple",
         "link_hop_simple", "copy_rate")  # fmt: skip
MESSAGES = ("message_launch", "message_hop_simple", "own_copy_rate")
SWITCH = ("nvls_base", "nvls_chunk")
RATES = ("ring_rate", "copy_rate", "own_copy_rate", "ll_channel_rate")

OWN, BORROWED = 0.02, 0.5
"""How much the value weighs that a fit starts from: a factor of e as much as a row that is 2 % off where the system
itself was measured, 50 % where others of its generation are few."""


@dataclass(frozen=True)
class Source:
    """Tables of one system that give a generation its constants."""

    generation: str
    family: str
    system: str
    version: str
    link: str


SOURCES = (
    Source("ampere", "a100", "a100_sxm", "2.27.3", "300GB/s"),
    Source("hopper", "h100", "h100_sxm", "2.29.2", "450GB/s"),
    Source("blackwell", "b200", "b200_sxm", "2.29.2", "900GB/s"),
)
GB300 = Source("blackwell", "gb300", "gb300", "2.29.2", "900GB/s")
OTHERS = {
    "hopper": ("gh200_alps_1x4_all_reduce", "h100_xxrjun_1x8_all_gather", "h100_xxrjun_1x8_all_reduce",
               "h100_xxrjun_1x8_alltoall"),
}  # fmt: skip
"""Further tables of a generation, which stand in for the system that is left out."""

Values = Mapping[str, float]


def main() -> None:
    """Write the constants of all generations, and those without each system."""
    tables = {source.system: _tables(source) for source in (*SOURCES, GB300)}
    found: dict[str, Values] = {}
    for source in SOURCES:
        found[source.generation] = fitted(source, tables[source.system], _mean(found.values(), source))
    LEFT_OUT_FOLDER.mkdir(exist_ok=True)
    for source in SOURCES:
        name = source.generation.title()
        head = f"# NCCL's constants of {name} inside one NVLink domain, measured on {source.system}."
        text = _file(head, found[source.generation], source, _measured_on(source))
        write_whole(CONSTANTS_FOLDER / f"nccl_{source.generation}.toml", text.encode())
        borrowed = _mean([found[each.generation] for each in SOURCES if each is not source], source)
        if source.generation == GB300.generation:
            without = fitted(GB300, tables[GB300.system], borrowed)
        else:
            without = _fit_families(source, borrowed) if source.generation in OTHERS else borrowed
        head = f"# NCCL's constants of {name} as they would be without the tables of {source.system}."
        text = _file(head, without, source, dict.fromkeys(_WHAT, _BORROWED))
        write_whole(LEFT_OUT_FOLDER / f"{source.system}.toml", text.encode())


def _measured_on(source: Source) -> dict[str, str]:
    """The sources of the constants that the tables of a system give."""
    how = f"NCCL {source.version}, 2 to 8 ranks"
    found = {name: f"measured: {_SOURCE}, {source.system}, {what}, {how}" for name, what in _WHAT.items()}
    if source.generation == "blackwell":
        found |= dict.fromkeys(("base_ll128", "link_hop_ll128"), _NO_LL128)
    return found


_SOURCE = "github.com/ai-dynamo/aiconfigurator 095f58a5 (Apache-2.0)"
_WHAT = {
    **dict.fromkeys(RINGS, "all_gather, reduce_scatter and all_reduce"),
    "ring_rate": "all_gather, slope between 256 and 512 MiB",
    **dict.fromkeys(MESSAGES, "alltoall"),
    **dict.fromkeys(SWITCH, "all_reduce of 8 ranks in the switch"),
}
_BORROWED = "other tables of the generation, and the geometric mean of the other generations, rates by NVLink"
_NO_LL128 = (
    "assumption: the geometric mean of Ampere and Hopper, as NCCL 2.29.2 takes no LL128 in the tables of b200_sxm"
)
_FIXED = {
    "message_hop_ll": ("0.6us", "NVIDIA/nccl 5067397c, src/graph/tuning.cc, hwLat, NVLink, Ring, LL"),
    "message_hop_ll128": ("1.9us", "NVIDIA/nccl 5067397c, src/graph/tuning.cc, hwLat, NVLink, Ring, LL128"),
}
_NVLS_CHANNELS = {
    "hopper": ("16", "NVIDIA/nccl 2.29.2, src/transport/nvls.cc, NVLS_NCHANNELS_SM90"),
    "blackwell": ("24", "NVIDIA/nccl 2.29.2, src/transport/nvls.cc, NVLS_NCHANNELS_SM100_NVL: inside one domain"),
}


def fitted(source: Source, tables: Sequence[MeasuredTable], prior: Values) -> Values:
    """The constants that the tables of a system give, near `prior` where they are silent."""
    cases = cases_of(tables, Choice(load_profile(source.family), ""))
    values = dict(prior)
    if rate := _slope(cases):
        values["ring_rate"] = rate
    rings = [case for case in cases if case.collective != "alltoall"]
    switch = [case for case in rings if case.collective == "all_reduce" and case.size == "8"]
    values = _fit(source.family, rings, RINGS, values)
    if source.generation in _NVLS_CHANNELS and switch:
        values = _fit(source.family, switch, SWITCH, values)
    return _fit(source.family, [case for case in cases if case.collective == "alltoall"], MESSAGES, values)


def _fit_families(source: Source, prior: Values) -> Values:
    """The constants that the other tables of a generation give, family by family."""
    tables = find_tables([own_tables() / f"{name}.csv" for name in OTHERS[source.generation]])
    values = dict(prior)
    parts: Sequence[tuple[Callable[[MeasuredTable], bool], Sequence[str]]] = (
        (lambda table: table.collective == "all_gather", ("ring_rate", "base_simple")),
        (lambda table: str(table.profile).startswith("gh200"), RINGS),
        (lambda table: table.collective == "all_reduce" and table.ranks == 8, SWITCH),
        (lambda table: table.collective == "alltoall", ("message_hop_simple", "own_copy_rate")),
    )
    for chosen, names in parts:
        part = [table for table in tables if chosen(table)]
        family = str(part[0].profile).partition("-")[0]
        values = _fit(family, cases_of(part, Choice(load_profile(family), "")), names, values, BORROWED)
    # both are launches by the same host: of all generations messages take 1.3 to 1.4 times as long as calls
    return {**values, "message_launch": prior["message_launch"] * values["base_ll"] / prior["base_ll"]}


def _tables(source: Source) -> tuple[MeasuredTable, ...]:
    found = find_tables([own_tables() / "aiconfigurator_one_node.csv"])
    library = f"nccl=={source.version}"
    return tuple(
        each for each in found if each.headers["system"] == source.system and each.headers["library"] == library
    )


def _slope(cases: Iterable[Case]) -> float | None:
    """The rate of rings: slopes of all_gather between the two largest sizes, as n - 1 hops and 2 copies of a shard."""
    rows, slopes = [], []
    for case in cases:
        if case.collective == "all_gather":
            (small, less_s), (large, more_s) = case.rows[-2:]
            n = case.table.ranks or 1
            slopes.append((more_s - less_s) * n / (large - small))
            rows.append((n - 1, 2))
    if len(rows) < 2:
        return None
    (per_hop, _), *_ = np.linalg.lstsq(np.array(rows, float), np.array(slopes), rcond=None)
    return float(1 / per_hop)


def _fit(
    family: str, cases: Sequence[Case], names: Sequence[str], values: Values, weight: float = OWN
) -> dict[str, float]:
    """The values with those of `names` that predict the cases best."""
    profile = load_profile(family)
    simulated, measured_log = Simulated(profile, cases), np.log(measured(cases))
    start = np.log([values[name] for name in names])

    def residuals(logs: FloatArray) -> FloatArray:
        tried = {**values, **dict(zip(names, np.exp(logs).tolist(), strict=True))}
        found: FloatArray = np.log(simulated(with_values(profile.parameters, tried))) - measured_log
        return np.concatenate([found, weight * (logs - start)])

    low = np.log([(CONSTANTS[name].min_constant and 0.61e-6) or 1e-12 for name in names])
    best = least_squares(
        residuals,
        np.maximum(start, low + 1e-6),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=np.full(len(names), 1e-3),
        bounds=(low, np.inf),
    )
    return {**values, **dict(zip(names, np.exp(best.x).tolist(), strict=True))}


def with_values(parameters: Parameters, values: Values) -> Parameters:
    """The parameters with these values."""
    return changed(parameters, {name: value for name, value in values.items() if name in parameters})


def _mean(others: Iterable[Values], source: Source) -> dict[str, float]:
    """The geometric mean of what other generations have; rates in proportion to the rate of NVLink."""
    link = CONSTANTS["link_bandwidth"].parse(source.link)
    known = list(others)
    if not known:
        return dict(_START)
    found = {}
    for name in _START:
        logs = [math.log(each[name] / (each["link"] if name in RATES else 1)) for each in known]
        found[name] = math.exp(sum(logs) / len(logs)) * (link if name in RATES else 1)
    return found | {"link": link}


_START = {
    "base_ll": 6.6e-6, "link_hop_ll": 0.7e-6, "ll_channel_rate": 6e9, "base_ll128": 14e-6, "link_hop_ll128": 1.9e-6,
    "base_simple": 8.4e-6, "link_hop_simple": 3.4e-6, "ring_rate": 240e9, "copy_rate": 1e12, "message_launch": 15e-6,
    "message_hop_simple": 3.4e-6, "own_copy_rate": 1e12, "nvls_base": 25e-6, "nvls_chunk": 1e-6, "link": 300e9,
}  # fmt: skip
"""Where the fit of the first generation starts: NCCL's own estimates and round numbers."""


def _file(head: str, values: Values, source: Source, sources: Mapping[str, str]) -> str:
    names = [*RINGS, "ring_rate", *MESSAGES, *(SWITCH if source.generation in _NVLS_CHANNELS else ())]
    constants: list[dict[str, str]] = []
    for name in names:
        constant = {"name": name, "value": CONSTANTS[name].format(values[name], 4)}
        if name == "ring_rate":
            constant["at"] = f"link_bandwidth = {source.link}"
        constants.append(constant | {"source": sources[name]})
    fixed = {
        **_FIXED,
        **({"nvls_channels": _NVLS_CHANNELS[source.generation]} if source.generation != "ampere" else {}),
    }
    constants += [{"name": name, "value": value, "source": why} for name, (value, why) in fixed.items()]
    made = "# Made by python -m experiments.accuracy.library_constants\n\n"
    return f"{head}\n{made}{msgspec.toml.encode({'constants': constants}).decode()}"


if __name__ == "__main__":
    main()
