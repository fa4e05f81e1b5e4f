"""Import of machines from the output of their own tools.

A file of links (JSON, TOML, CSV) joins a family by its ``profile``. Three formats of tools are recognised by content:

- the matrix of ``nvidia-smi topo -m``, and the tables of ``amd-smi topology`` and ``rocm-smi --showtopo``
  (`tasp_lab.machines.importers.matrices`),
- the XML that NCCL and RCCL write to ``NCCL_TOPO_DUMP_FILE`` (`tasp_lab.machines.importers.nccl_xml`).

They are read as they are pasted: quoted, in a code fence, with escapes of the terminal, and with text around them.
Ranks are the GPUs in the order of the file; in the XML, in the order of its own ranks.

No format has the bandwidth of NVLink or xGMI. Each machine lists the values used as constants, with their sources and
whether they are assumptions.

PCIe is part of the machine only if NVLink or xGMI do not connect all GPUs, because NCCL uses one kind of link for a
ring; ``pcie`` overrides this. GPUs of one NUMA node meet in it; sockets share one path, and which NUMA nodes share a
socket is an assumption. NICs are left out, since the output of one machine does not include the network.

With the ``profile`` of a family, the machine has that family's library, kernels and constants, and NICs
(`tasp_lab.machines.importers.assembly`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tasp_lab.core.errors import ProfileError, QuantityError, TopologyError
from tasp_lab.core.records import as_text, read_file
from tasp_lab.machines.catalogue import ENDINGS, load_machine
from tasp_lab.machines.importers import nccl_xml
from tasp_lab.machines.importers.assembly import assemble, of_family
from tasp_lab.machines.importers.matrices import amd_tool, is_nvidia_smi, read_amd, read_nvidia_smi
from tasp_lab.machines.importers.survey import Given, Survey
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.profile import load_profile

__all__ = ["import_topology", "read_topology"]


def import_topology(
    text: str,
    name: str,
    *,
    link_bandwidth: str | None = None,
    pcie_bandwidth: str | None = None,
    cpu_bandwidth: str | None = None,
    nvswitch: bool | None = None,
    pcie: bool | None = None,
    sockets: int | None = None,
    profile: str | None = None,
    nodes: int = 1,
    rails: bool = False,
) -> Machine:
    """The machine that a tool's output describes, named `name`.

    Bandwidths are texts with a unit, one way. `link_bandwidth` is that of one NVLink or xGMI link; without it
    nvidia-smi counts 25GB/s (NVLink 2 to 4; NVLink 1 has 20, NVLink 5 has 50), rocm-smi 64GB/s (MI300X), amd-smi what
    the driver states, and the XML the line rate of the generation it names. `pcie_bandwidth` is that of one PCIe link;
    without it the XML tells it, and the others count 31.5GB/s (PCIe 4.0 x16). `cpu_bandwidth` is that between two
    sockets, 22GB/s without it.

    `nvswitch` says of a matrix of nvidia-smi whether its NVLinks end in a switch; without it they do where a GPU would
    need more than the 18 links that any has. `pcie` says whether to include PCIe; without it PCIe is included where
    NVLink or xGMI do not join all GPUs. `sockets` is the number of CPU sockets, to which NUMA nodes belong in equal
    parts; without it there are two, or one where all GPUs are in one NUMA node.

    `profile` is a family or a file of one, whose machines have such wiring; the machine then has `nodes` such nodes,
    whose NICs meet in one network, or with `rails` in one switch for each NIC of a node.

    >>> machine = import_topology('''
    ...         GPU0    GPU1    CPU Affinity
    ... GPU0     X      NV4     0-31
    ... GPU1    NV4      X      0-31
    ... ''', "two-gpus")
    >>> [(link.name, link.bandwidth_bytes_per_s) for link in machine.topology.links]
    [('0->1', 100000000000.0), ('1->0', 100000000000.0)]

    Raises `TopologyError` with one line that says where the text is wrong, what was found and what was expected, and
    `QuantityError` for a bandwidth that is none. With a profile, `ProfileError` for an unknown one and for one whose
    machines are wired otherwise.
    """
    if not name.strip() or not name.isprintable():
        raise TopologyError(f"{name!a} is no name of a topology, expected text that can be seen")
    options = Given(link_bandwidth, pcie_bandwidth, cpu_bandwidth, nvswitch, pcie, sockets)
    survey = _read(text, options)
    machine = assemble(survey, name, options)
    if profile is None:
        if nodes != 1 or rails:
            raise TopologyError("nodes and rails need a profile, which has the network between nodes")
        return machine
    return of_family(survey, machine, profile, nodes, rails=rails)


def read_topology(path: Path, **options: Any) -> Machine:
    """The machine that a file describes, named as the file without its ending; options as in `import_topology`.

    Raises `TopologyError` naming the file.
    """
    where = f"file {str(path)!r}"
    data = read_file(path, TopologyError)
    if path.suffix.lower() in ENDINGS:
        return _of_machine_file(path, where, **options)
    try:
        return import_topology(as_text(data), path.stem, **options)
    except ValueError as error:
        raise TopologyError(f"{where}: {error}") from error
    except (TopologyError, QuantityError, ProfileError) as error:
        raise type(error)(f"{where}: {error}") from error


def _of_machine_file(path: Path, where: str, profile: str | None = None, nodes: int = 1, **options: Any) -> Machine:
    """The machine of a file of links, or a list of them, which joins a family. Raises `TopologyError`."""
    given = [name for name, value in options.items() if value] + ["nodes"] * (nodes != 1)
    if given or profile is None:
        raise TopologyError(
            f"{where} lists its links, expected a profile and no other option, got {', '.join(given) or 'nothing'}"
        )
    machine = load_machine(str(path))
    return load_profile(profile).machine_on(machine.topology, machine.parameters, profile)


_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|(?:\^\[)?\[[0-9;]*m")
"""A terminal escape sequence: nvidia-smi underlines its header even in a file. Pages lose the first character of it."""

_QUOTE = re.compile(r"(?m)^[ \t]*(?:(?:>|&gt;)[ \t]?)+")
"""What mails and issues put before a line that they quote."""

_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def _read(text: str, options: Given) -> Survey:
    """The survey of a text as it is pasted: with marks of quotes, and of XML with text around it."""
    text = _ESCAPE.sub("", text.removeprefix("\ufeff"))
    if not text.lstrip().startswith("<"):
        text = _QUOTE.sub("", text.replace("\xa0", " "))  # pages have no-break spaces
        if begin := re.search(r"(?m)^[ \t]*<system\b", text):
            # empty lines in place of what is before, so that messages have the right numbers
            text = "\n" * text.count("\n", 0, begin.start()) + text[begin.start() :].lstrip()
    is_xml = text.lstrip().startswith("<")
    if is_xml and "</system>" in text:
        text = text[: text.rindex("</system>") + len("</system>")]
    if not text.strip():
        raise TopologyError("the text is empty, expected what nvidia-smi topo -m, amd-smi topology or NCCL wrote")
    if wrong := _NO_TEXT.search(text):
        line = text.count("\n", 0, wrong.start()) + 1
        raise TopologyError(f"line {line}: the character {wrong[0]!a} is no text, expected what a tool printed")
    lines = text.splitlines()
    amd = amd_tool(lines)
    if options.nvswitch is not None and (is_xml or amd):
        raise TopologyError("nvswitch was given, but only a matrix of nvidia-smi leaves open whether there is a switch")
    if is_xml:
        return nccl_xml.read(text, options)
    if amd:
        return read_amd(lines, amd, options)
    if is_nvidia_smi(lines):
        return read_nvidia_smi(lines, options)
    raise TopologyError(
        "the format is unknown, expected the matrix of nvidia-smi topo -m, the tables of amd-smi topology or rocm-smi "
        "--showtopo, or the XML of NCCL_TOPO_DUMP_FILE"
    )
