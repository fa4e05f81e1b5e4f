"""What is installed and what this machine can do.

This is the command for installations that are broken: nothing is imported here but where it is examined, and what goes
wrong then is a finding like any other.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tasp_lab.cli.report import on_one_line

_PACKAGES = ("tasp_lab", "sim", "runtime")
_LIBRARIES = (
    "simpy",
    "networkx",
    "scipy",
    "numpy",
    "msgspec",
    "matplotlib",
    "pyroute2",
    "torch",
    "flash-attn",
    "ortools",
)

Examination = dict[str, object]


def examine() -> Examination:
    """Everything that `tasp-lab doctor` reports, as a JSON-able object."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _finding(_cores),
        "packages": {name: _finding(_folder, name) for name in _PACKAGES},
        "libraries": {name: _finding(_version, name) for name in _LIBRARIES},
        "gpus": _finding(_gpus),
        "flash_attention_works": _flash_attention_works(),
        "simulator": _finding(_simulator),
        "emulated_fabric": _finding(_emulated_fabric),
    }


def print_examination(examination: Examination) -> None:
    """The examination as lines of name and finding."""
    console = Console(highlight=False, soft_wrap=True)
    for name, finding in examination.items():
        if isinstance(finding, dict):
            console.print(Text(name, style="bold"))
            for key, value in finding.items():
                console.print(Text(f"  {key}: {value if value is not None else 'not installed'}"))
        else:
            console.print(Text.assemble((name, "bold"), f": {finding}"))


def _finding(examine_one: Callable[..., object], *arguments: str) -> object:
    """What an examination finds, or why it fails."""
    try:
        return examine_one(*arguments)
    except Exception as error:
        return f"does not work here: {on_one_line(f'{type(error).__name__}: {error}')}"


def _cores() -> int:
    from runtime.host import usable_cores

    return usable_cores()


def _folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    torch = importlib.import_module("torch")
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _flash_attention_works() -> bool:
    """Whether the compiled function is there: the package can install without it."""
    try:
        importlib.import_module("flash_attn_2_cuda")
    except Exception:
        return False
    return True


def _simulator() -> str:
    from sim.engine import simulate
    from tasp_lab.all_gather import ring_all_gather
    from tasp_lab.builders import full_mesh
    from tasp_lab.machine import Machine

    mesh = full_mesh(2)
    simulate(ring_all_gather(mesh, 1), Machine(mesh))
    return "works"


def _emulated_fabric() -> str:
    if importlib.util.find_spec("pyroute2") is None or importlib.util.find_spec("torch") is None:
        return "needs the packages of the extra 'runtime'"
    from runtime.fabric import missing_here

    missing = missing_here()
    return "works" if missing is None else f"does not work here: {missing}"
