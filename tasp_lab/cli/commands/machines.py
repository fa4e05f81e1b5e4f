"""``tasp-lab topologies``, ``profile`` and ``decompose``: machines, their constants, and the rings of topologies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from tasp_lab.cli.console import Document, print_json, print_parts, tell
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    DEFAULT_RINGS,
    MACHINE,
    NO_CHANGES,
    ExpressionNumbers,
    Json,
    PartChoice,
    RingChoice,
    Sources,
    TopologyText,
    flag,
    plot,
    quantity,
    whole,
)
from tasp_lab.cli.outputs import check_outputs, write_picture
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.progress import on_one_line, print_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_bandwidth, format_time

if TYPE_CHECKING:
    from tasp_lab.machines.machine import Machine
    from tasp_lab.machines.profile import Profile


topologies = App(name="topologies", sort_key=1)


@topologies.default
def show_topologies(
    name: TopologyText | None = None,
    /,
    *,
    numbers: ExpressionNumbers = DEFAULT_NUMBERS,
    changes: PartChoice = NO_CHANGES,
    sources: Sources = False,
    json: Json = False,
) -> None:
    """List the machines of the catalogue, or show one topology.

    With a name, print its links and the source of each parameter; `--json` prints a topology file.

    Example: tasp-lab topologies h100-8
    """
    if name is not None:
        from tasp_lab.prediction.inputs import changed_machine

        machine = changed_machine(numbers.load(name, "ideal"), changes.overrides, changes.without)
        _show_machine(machine, json, sources)
        return
    if numbers.given:
        raise QuantityError(numbers.refusal())
    if changes != NO_CHANGES:
        raise QuantityError("--set and --without apply to one topology only")
    from tasp_lab.machines.catalogue import catalogue_names, load_machine
    from tasp_lab.machines.profile import profile_names
    from tasp_lab.machines.slices import pod_names
    from tasp_lab.topology.expressions import expression_forms

    machines = [load_machine(each, library="ideal") for each in catalogue_names()]
    rows = [{"name": m.topology.name, "world_size": m.topology.world_size, "summary": m.summary} for m in machines]
    parts: list[Part] = [
        *Table.of("machines", rows, {"name": "{name}", "ranks": "{world_size}", "summary": "{summary}"}, (0, 2)),
        f"families, with any number of nodes: {', '.join(f'{each}-NODESxRANKS' for each in profile_names())}",
        f"slices of pods, in any of their shapes: {', '.join(f'{each}:SHAPE' for each in pod_names())}",
        f"expressions: {', '.join(expression_forms().values())}",
    ]
    tell(View({"topologies": rows}, rows, parts), json)


@Parameter(name="*", group=MACHINE)
@dataclass(frozen=True)
class ImportChoice:
    """What a file does not contain, see `tasp_lab.machines.importers.read_topology`.

    Args:
        link_bandwidth: Bandwidth of one NVLink or xGMI link, one way.
        pcie_bandwidth: Bandwidth of one PCIe link, one way.
        cpu_bandwidth: Bandwidth between two sockets, one way.
        nvswitch: Whether NVLinks lead to switches. Default: detected.
        pcie: Whether to include PCIe. Default: where it is needed.
        sockets: Number of CPU sockets that share the NUMA nodes. Default: 1 or 2.
        profile: A family, such as h100, or a profile of your own: the file has its wiring, and the machine gets its
            library, kernels, constants and NICs.
        nodes: Number of nodes like that of the file, connected by their NICs; with --profile.
        rails: One switch per rail, for NICs of equal place.
    """

    link_bandwidth: Annotated[str | None, quantity(MACHINE)] = None
    pcie_bandwidth: Annotated[str | None, quantity(MACHINE)] = None
    cpu_bandwidth: Annotated[str | None, quantity(MACHINE)] = None
    nvswitch: bool | None = None
    pcie: bool | None = None
    sockets: Annotated[int | None, whole(MACHINE)] = None
    profile: str | None = None
    nodes: int = 1
    rails: Annotated[bool, flag(MACHINE)] = False


FROM_FILE = ImportChoice()


@topologies.command(name="import")
def import_file(
    file: Path,
    /,
    *,
    choice: ImportChoice = FROM_FILE,
    sources: Sources = False,
    json: Json = False,
) -> None:
    """Read a topology from nvidia-smi topo -m, amd-smi topology, rocm-smi --showtopo, or NCCL_TOPO_DUMP_FILE.

    A list of links, or any topology file, joins a family by `--profile`. `--json` prints a topology file, and what it
    assumes on standard error.

    Example: nvidia-smi topo -m > topo.txt; tasp-lab topologies import topo.txt --json > machine.json

    Example: tasp-lab topologies import topo.txt --profile h100 --nodes 4 --json > cluster.json

    Example: tasp-lab topologies import links.csv --profile h100 --json > machine.json
    """
    from tasp_lab.machines.constants import CONSTANTS
    from tasp_lab.machines.importers import read_topology

    machine = read_topology(file, **vars(choice))
    if json:
        for each in machine.parameters.values():  # of a family, what its profile assumes is no matter of the file
            if each.assumed and (choice.profile is None or each.name not in CONSTANTS):
                print_progress(f"{each.name} = {each.text}: {each.source}")
    _show_machine(machine, json, sources)


def _show_machine(machine: Machine, json: bool, sources: bool) -> None:
    from tasp_lab.machines.machine_file import topology_document

    if json:
        print_json(topology_document(machine))
        return
    topology = machine.topology
    kinds = Counter(
        (
            "rank to rank"
            if isinstance(link.source, int) and isinstance(link.destination, int)
            else "to or from a switch",
            format_bandwidth(link.bandwidth_bytes_per_s),
            format_time(link.latency_s),
        )
        for link in topology.listed_links()
    )
    rows = [(ends, str(count), bandwidth, latency) for (ends, bandwidth, latency), count in kinds.items()]
    title = f"{topology.name}: {topology.world_size} ranks"
    parts: list[Part] = [machine.summary] if machine.summary else []
    parts.append(Table(title, ("links", "count", "bandwidth", "latency"), rows))
    for constant in machine.parameters.values():
        parts += [f"{constant.name} = {constant.value}", _source(constant.source, sources)]
    print_parts(parts)


SOURCE_WIDTH = 76
"""Characters of a source on one line, of 80 with the spaces before it."""


def _source(text: str, whole: bool) -> str:
    """A source below what it is of: the whole text, or one line of it."""
    return f"    {text if whole else shorten(text, SOURCE_WIDTH, placeholder=' ...')}"


profile = App(name="profile", sort_key=8, help="Machines with their communication library, constant by constant.")


@profile.command(name="list")
def list_profiles(*, json: Json = False) -> None:
    """List the system families that have a profile.

    Example: tasp-lab profile list
    """
    from tasp_lab.machines.profile import load_profile, profile_names

    names = ("name", "summary", "library", "ranks_per_node")
    rows = [{name: getattr(load_profile(each), name) for name in names} for each in profile_names()]
    columns = {"family": "{name}", "library": "{library}", "ranks per node": "{ranks_per_node}", "summary": "{summary}"}
    tell(View({"profiles": rows}, rows, Table.of("profiles", rows, columns, (0, 1, 3))), json)


@profile.command(name="show")
def show_profile(name: str, /, *, sources: Sources = False, json: Json = False) -> None:
    """Show every parameter of a machine with value, meaning and source.

    NAME is a family (h100), a machine (h100-8, h100-10x8), or a profile file.

    Example: tasp-lab profile show h100-8
    """
    from tasp_lab.machines.profile import find_profile

    found, machine = find_profile(name)
    if json:
        print_json(_profile_document(found, machine))
    else:
        print_parts([*_profile_parts(found, machine, sources), *_kernel_parts(machine, sources)])


def _profile_document(profile: Profile, machine: Machine) -> Document:
    """A profile with every constant: its text, its value in SI units, its meaning and its source."""
    from tasp_lab.machines.constants import CONSTANTS
    from tasp_lab.machines.intervals import interval_fields

    return {
        "profile": profile.name,
        "machine": machine.topology.name,
        "ranks": machine.topology.world_size,
        "summary": profile.summary,
        "library": profile.library,
        "constants": [
            {
                "name": constant.name,
                "text": constant.text,
                "at": constant.at_text or None,
                "value": profile.parameters.numbers[constant.name],
                "unit": CONSTANTS[constant.name].unit,
                **interval_fields(constant, profile.parameters.numbers[constant.name]),
                "meaning": CONSTANTS[constant.name].meaning,
                "source": constant.source,
            }
            for constant in profile.parameters.values()
        ],
        "kernels": _kernels(machine),
    }


def _kernels(machine: Machine) -> list[Document]:
    """Every kernel of the accelerator, by pass and head dimension, with its constants; the default ones first."""
    from tasp_lab.machines.compute import kernel_constants, kernels_on

    return [
        {
            "name": kernel.name,
            "default": number == 0,
            "pass": variant.passing,
            "head_dim": variant.head_dim,
            "peak_flops_per_s": kernel.peak_rate(variant.passing, variant.head_dim),
            "assumed": kernel.assumption(variant.passing, variant.head_dim) or None,
            "constants": [
                {"name": each.name, "text": each.text, "source": each.source}
                for each in kernel_constants(kernel, variant.passing, variant.head_dim)
            ],
        }
        for number, kernel in enumerate(kernels_on(machine.accelerator))
        for variant in kernel.file.variants
    ]


def _profile_parts(profile: Profile, machine: Machine, sources: bool) -> Iterator[Part]:
    """A profile for people."""
    from tasp_lab.machines.constants import CONSTANTS
    from tasp_lab.machines.intervals import interval_text

    yield f"{machine.topology.name}: {machine.topology.world_size} ranks. {profile.summary}"
    for constant in profile.parameters.values():
        at = "" if constant.at is None else f" at {constant.at_text}"
        value = f"{constant.text}{at}{interval_text(constant)}"
        yield from ("", f"{constant.name} = {value}    {CONSTANTS[constant.name].meaning}")
        yield _source(constant.source, sources)


def _kernel_parts(machine: Machine, sources: bool) -> Iterator[Part]:
    """The kernels, a line for each pass and head dimension; ``--json`` has all their constants."""
    from tasp_lab.core.units import format_flops, format_time
    from tasp_lab.machines.compute import kernels_on

    for number, kernel in enumerate(kernels_on(machine.accelerator)):
        yield from (
            "",
            f"kernel {kernel.name}{'' if number else ' (default)'}    attention by shape: tiles over the SMs",
        )
        for variant in kernel.file.variants:
            assumed = kernel.assumption(variant.passing, variant.head_dim)
            peak, rate = kernel.peak_rate(variant.passing, variant.head_dim), variant.rate
            low, high = (format_flops(peak * end / rate.value) for end in (rate.low, rate.high))
            yield (
                f"    {variant.passing}, head dimension {variant.head_dim}: up to "
                f"{format_flops(peak)} ({low} to {high}), tiles of "
                f"{variant.design.rows} x {variant.design.columns}, launch {format_time(variant.launch_s.value)}"
            )
            yield _source(assumed or variant.rate.source, sources)


def decompose(
    topology: TopologyText,
    /,
    *,
    numbers: ExpressionNumbers = DEFAULT_NUMBERS,
    changes: PartChoice = NO_CHANGES,
    rings: RingChoice = DEFAULT_RINGS,
    plot: Annotated[Path | None, plot("the rings")] = None,
    json: Json = False,
) -> None:
    """Decompose a topology into rings and compare them with the AllGather bound.

    The rings are those with the highest total bandwidth.

    Example: tasp-lab decompose full-mesh:5 --without link.0-3
    """
    from tasp_lab.prediction import decompose as decomposition

    with limited_memory():
        machine = numbers.load(topology, "ideal")
        check_outputs(plot=plot, topology=topology)
        found = decomposition.decompose(machine, **vars(changes), **vars(rings), progress=print_progress)
    if plot is not None:
        from tasp_lab.plots.rings import draw_decomposition

        write_picture(draw_decomposition(found, on_one_line(f"Rings of {found.topology.name}")), plot)
    tell(found, json)
