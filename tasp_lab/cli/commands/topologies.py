"""``tasp-lab topologies``: the catalogue, one topology, or the import of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from tasp_lab.cli.console import print_json, print_table
from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    MACHINE,
    NO_CHANGES,
    ExpressionNumbers,
    Json,
    LinkEdits,
    TopologyText,
    quantity,
)
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import format_bandwidth, format_time

if TYPE_CHECKING:
    from tasp_lab.machines.machine import Machine

topologies = App(name="topologies", sort_key=1)


@topologies.default
def show(
    name: TopologyText | None = None,
    /,
    *,
    numbers: ExpressionNumbers = DEFAULT_NUMBERS,
    changes: LinkEdits = NO_CHANGES,
    json: Json = False,
) -> None:
    """List the machines of the catalogue, or show one topology.

    With a name, print its links and the source of each parameter; `--json` prints a topology file.

    Example: tasp-lab topologies h100-8
    """
    if name is not None:
        from tasp_lab.prediction.inputs import as_machine

        _show_machine(as_machine(numbers.load(name, "ideal"), "auto", changes.without_link, changes.link), json)
        return
    if numbers.given:
        raise QuantityError(numbers.refusal())
    if changes != NO_CHANGES:
        raise QuantityError("--without-link and --link apply to one topology only")
    _list_catalogue(json)


def _list_catalogue(json: bool) -> None:
    from tasp_lab.machines.catalogue import catalogue_names, load_machine
    from tasp_lab.machines.profile import profile_names
    from tasp_lab.topology.expressions import expression_forms

    machines = [(each, load_machine(each, library="ideal")) for each in catalogue_names()]
    if json:
        print_json({"topologies": [
            {"name": each, "world_size": m.topology.world_size, "summary": m.summary} for each, m in machines
        ]})  # fmt: skip
        return
    rows = [(each, str(m.topology.world_size), m.summary) for each, m in machines]
    print_table("machines", ("name", "ranks", "summary"), rows, texts=(0, 2))
    print(f"families, with any number of nodes: {', '.join(f'{each}-NODESxRANKS' for each in profile_names())}")
    print(f"expressions: {', '.join(expression_forms().values())}")


@topologies.command(name="import")
def import_file(
    file: Path,
    /,
    *,
    link_bandwidth: Annotated[str | None, quantity("Bandwidth of one NVLink or xGMI link, one way.", MACHINE)] = None,
    pcie_bandwidth: Annotated[str | None, quantity("Bandwidth of one PCIe link, one way.", MACHINE)] = None,
    cpu_bandwidth: Annotated[str | None, quantity("Bandwidth between two NUMA nodes, one way.", MACHINE)] = None,
    nvswitch: Annotated[
        bool | None, Parameter(group=MACHINE, help="Whether NVLinks lead to switches. Default: detected.")
    ] = None,
    pcie: Annotated[
        bool | None, Parameter(group=MACHINE, help="Whether to include PCIe. Default: where it is needed.")
    ] = None,
    profile: Annotated[
        str | None,
        Parameter(
            group=MACHINE,
            help="A family, such as h100, or a profile of your own: the file has its wiring, and the machine gets its "
            "library, kernels, constants and NICs.",
        ),
    ] = None,
    nodes: Annotated[
        int,
        Parameter(
            group=MACHINE, help="Number of nodes like that of the file, connected by their NICs; with --profile."
        ),
    ] = 1,
    rails: Annotated[
        bool,
        Parameter(group=MACHINE, negative=(), show_default=False, help="One switch per rail, for NICs of equal place."),
    ] = False,
    json: Json = False,
) -> None:
    """Read a topology from the output of nvidia-smi topo -m, rocm-smi --showtopo, or NCCL_TOPO_DUMP_FILE.

    `--json` prints a topology file.

    Example: nvidia-smi topo -m > topo.txt; tasp-lab topologies import topo.txt --json > machine.json

    Example: tasp-lab topologies import topo.txt --profile h100 --nodes 4 --json > cluster.json
    """
    from tasp_lab.machines.importers import read_topology

    machine = read_topology(
        file,
        link_bandwidth=link_bandwidth,
        pcie_bandwidth=pcie_bandwidth,
        cpu_bandwidth=cpu_bandwidth,
        nvswitch=nvswitch,
        pcie=pcie,
        profile=profile,
        nodes=nodes,
        rails=rails,
    )
    _show_machine(machine, json)


def _show_machine(machine: Machine, json: bool) -> None:
    from tasp_lab.machines.catalogue import topology_document

    if json:
        print_json(topology_document(machine))
    else:
        _print_machine(machine)


def _print_machine(machine: Machine) -> None:
    topology = machine.topology
    if machine.summary:
        print(machine.summary)
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
    print_table(f"{topology.name}: {topology.world_size} ranks", ("links", "count", "bandwidth", "latency"), rows)
    for constant in machine.parameters.values():
        print(f"{constant.name} = {constant.value}\n    {constant.source}")
