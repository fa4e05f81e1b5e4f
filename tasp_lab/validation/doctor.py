"""The examination of an installation: what is installed, and what works on this machine.

An installation may be broken, so each package is imported only where it is examined, and an error is a finding like any
other.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import on_one_line

_PACKAGES = ("tasp_lab", "sim", "runtime")
_LIBRARIES = (
    "simpy", "networkx", "scipy", "numpy", "msgspec", "matplotlib", "pyroute2", "torch", "flash-attn",
    "flash-linear-attention", "ortools",
)  # fmt: skip


def examine() -> dict[str, object]:
    """The findings of `tasp-lab doctor`, as a JSON object."""
    has_torch = find_spec("torch") is not None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _finding(usable_cores),
        "packages": {name: _finding(_folder, name) for name in _PACKAGES},
        "libraries": {name: _finding(_version, name) for name in _LIBRARIES},
        "gpus": _finding(_gpus) if has_torch else [],
        "gpu_driver": _finding(_call, "runtime.linux", "driver_version"),
        # what torch was built for, and whether it has NCCL or RCCL, and which
        "gpu_libraries": _finding(_call, "runtime.executor.transports", "gpu_libraries") if has_torch else {},
        "variables": _finding(_call, "runtime.linux", "library_variables"),
        # the package can install without its compiled function
        "flash_attention_works": not str(_finding(import_module, "flash_attn_2_cuda")).startswith(_FAILS),
        "simulator": _finding(_simulator),
        "emulated_fabric": _finding(_emulated_fabric),
    }


_FAILS = "does not work here: "


def _finding(examine_one: Callable[..., Any], *arguments: str) -> Any:
    """The finding of an examination, or why it fails."""
    try:
        return examine_one(*arguments)
    except Exception as error:
        return _FAILS + on_one_line(f"{type(error).__name__}: {error}")


def _call(module: str, function: str) -> object:
    return getattr(import_module(module), function)()


def _folder(package: str) -> str | None:
    spec = find_spec(package)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    cuda = import_module("torch").cuda
    return [cuda.get_device_name(index) for index in range(cuda.device_count())]


def _simulator() -> str:
    from sim.simulate import simulate
    from tasp_lab.machines.machine import Machine
    from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    from tasp_lab.topology.builders import full_mesh

    mesh = full_mesh(2)
    for which in ("array", "simpy"):
        simulate(ring_all_gather(mesh, 1), Machine(mesh), which=which)
    return "works"


def _emulated_fabric() -> str:
    if find_spec("pyroute2") is None or find_spec("torch") is None:
        return "needs the packages of the extra 'runtime'"
    missing = _call("runtime.fabric.emulated", "missing_here")
    return "works" if missing is None else f"{_FAILS}{missing}"
