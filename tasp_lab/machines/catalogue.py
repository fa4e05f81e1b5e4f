"""Machines by name, by file and by expression.

A name is one of the catalogue (the data files of `tasp_lab.machines`, and the members that profiles list) or of any
other member of a family that has a profile (`tasp_lab.machines.profile`: ``h100-10x8``) or of a slice of a TPU pod
(`tasp_lab.machines.slices`: ``tpu-v5p:4x4x4``), a file ends in ``.json``,
``.toml`` or ``.csv``, and an expression is short for a builder (`tasp_lab.topology.expressions`): ``full-mesh:8``,
``torus:4x4``, ``nodes:2x8:switch:rails``. The forms of a file are in `tasp_lab.machines.machine_file`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path, PurePath

from tasp_lab.core.errors import ProfileError, TopologyError, alternatives, nearest, of_type
from tasp_lab.core.records import data_names, read_file
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.machines.profile import listed_members, member
from tasp_lab.machines.slices import listed_slices, load_slice, pod_names
from tasp_lab.machines.system import LIBRARIES, gloo
from tasp_lab.topology.expressions import EXPRESSION_DEFAULTS, ExpressionDefaults, expression_forms, parse_expression

ENDINGS = (".json", ".toml", ".csv")
"""How the names of machine files end."""


def load_machine(text: str, defaults: ExpressionDefaults = EXPRESSION_DEFAULTS, *, library: str = "auto") -> Machine:
    """The machine of a catalogue name, a file or an expression, with its communication library.

    Parameters
    ----------
    text : the name, the file or the expression.
    defaults : the numbers of a bare expression; names and files have their own.
    library : ``auto`` for that of the machine's profile or file, if any, else ``ideal``; ``ideal`` for the links
        alone; ``gloo`` for any machine; ``nccl`` or ``rccl`` for machines whose profile has it, NCCL also with its
        version, like ``nccl==2.28``.

    >>> load_machine("h100-8").comm_library.name, load_machine("h100-8", library="ideal").comm_library.name
    ('nccl', 'ideal')
    >>> len(load_machine("nodes:2x4").topology.links)
    40

    Raises `TopologyError` for an unknown name and a malformed file or expression, and `ProfileError` for a library that
    is unknown or for which the machine has no constants.
    """
    if not isinstance(text, str):
        raise TopologyError(of_type("machine", text, "the name of a machine"))
    if library.partition("==")[0] not in ("auto", *LIBRARIES):
        raise ProfileError(f"library {library!r} is unknown: expected auto, {', '.join(LIBRARIES)}")
    # members first: most names are theirs, and descriptions are files to read
    machine = member(text, library)
    if machine is not None:
        return machine
    if text in _described():
        file = files("tasp_lab.machines") / "descriptions" / f"{text}.toml"
        machine = _read(f"machine {text!r}", PurePath(file.name), file.read_bytes())
    elif text.partition(":")[0] in pod_names():
        family, _, shape = text.partition(":")
        machine = load_slice(family, shape)
    elif text.partition(":")[0] in expression_forms():
        machine = Machine(parse_expression(text).build(defaults))
    elif Path(text).suffix.lower() in ENDINGS or os.sep in text or os.path.exists(text):
        machine = _load_file(Path(text), library)
    else:
        raise TopologyError(_unknown(text))
    if library == "auto" or machine.system is not None:
        return machine
    if library not in ("ideal", "gloo"):
        how = ", or a file of topologies import --profile" if Path(text).suffix.lower() in ENDINGS else ""
        raise ProfileError(f"library {library!r}: {text} has no profile; expected auto, ideal or gloo there{how}")
    return replace(machine, comm_library=gloo({}) if library == "gloo" else IDEAL)


def _read(where: str, path: PurePath, data: bytes, library: str = "auto") -> Machine:
    from tasp_lab.machines.machine_file import read_machine  # most machines are systems of a profile

    return read_machine(where, path, data, library)


def catalogue_names() -> list[str]:
    """The machines of tasp-lab, in alphabetical order.

    >>> catalogue_names()[:3]
    ['a10-4-pcie', 'a100-8', 'a100_100g-2x8']
    """
    return sorted([*_described(), *listed_members(), *listed_slices()])


def is_expression(text: str) -> bool:
    """Whether a text is an expression, which takes numbers; catalogue names and files have their own.

    >>> is_expression("switch:8"), is_expression("h100-8")
    (True, False)
    """
    return text.partition(":")[0] in expression_forms() and text not in catalogue_names()


def _described() -> list[str]:
    """The machines with their own description."""
    return data_names("tasp_lab.machines", "descriptions")


def _unknown(text: str) -> str:
    near = nearest(text.partition(":")[0], [*expression_forms(), *catalogue_names()], 5)
    kind = next((each for each in expression_forms() if re.match(rf"{each}[-_ ]?\d", text)), None)
    if kind is not None:  # an expression without its colon
        near = [f"{kind}:{text.removeprefix(kind).lstrip('-_ ')}"]
    hint = f" (did you mean {alternatives(near)}?)" if near else ""
    return (
        f"machine {text!r} is unknown{hint}: expected a machine such as h100-8 or h100-10x8, a .json, .toml or .csv "
        "file, or an expression such as full-mesh:8 or nodes:2x8; tasp-lab topologies lists all"
    )


def _load_file(path: Path, library: str) -> Machine:
    where = f"file {str(path)!r}"
    if os.path.isdir(path):
        raise TopologyError(f"{where} is a directory, expected a file whose name ends in .json, .toml or .csv")
    if path.suffix.lower() not in ENDINGS:
        raise TopologyError(f"{where}: expected a file whose name ends in .json, .toml or .csv")
    if os.path.exists(path) and not os.path.isfile(path):
        raise TopologyError(f"{where} is no regular file")
    return _read(where, path, read_file(path, TopologyError), library)
