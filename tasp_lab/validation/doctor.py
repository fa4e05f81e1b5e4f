"""The examination of an installation: what is installed, and what works on this machine.

An installation may be broken, so each package is imported only where it is examined, and an error is a finding like any
other.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import on_one_line

_PACKAGES = ("tasp_lab", "sim", "runtime")
_LIBRARIES = (
    "simpy", "networkx", "scipy", "numpy", "msgspec", "matplotlib", "pyroute2", "torch", "flash-attn",
    "flash-linear-attention", "ortools",
)  # fmt: skip

Examination = dict[str, object]


def examine() -> Examination:
    """The findings of `tasp-lab doctor`, as a JSON object."""
    import platform

    has_torch = importlib.util.find_spec("torch") is not None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _finding(usable_cores),
        "packages": {name: _finding(_folder, name) for name in _PACKAGES},
        "libraries": {name: _finding(_version, name) for name in _LIBRARIES},
        "gpus": _finding(_gpus),
        "gpu_driver": _finding(_of_runtime, "runtime.linux", "driver_version"),
        # what torch was built for, and whether it has NCCL or RCCL, and which
        "gpu_libraries": _finding(_of_runtime, "runtime.executor.transports", "gpu_libraries") if has_torch else {},
        "variables": _finding(_of_runtime, "runtime.linux", "library_variables"),
        "flash_attention_works": _flash_attention_works(),
        "simulator": _finding(_simulator),
        "emulated_fabric": _finding(_emulated_fabric),
    }


def _finding(examine_one: Callable[..., object], *arguments: str) -> object:
    """The finding of an examination, or why it fails."""
    try:
        return examine_one(*arguments)
    except Exception as error:
        return f"does not work here: {on_one_line(f'{type(error).__name__}: {error}')}"


def _folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else None


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    torch = importlib.import_module("torch")
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _of_runtime(module: str, function: str) -> object:
    """What a function of a module of the executor finds."""
    return getattr(importlib.import_module(module), function)()


def _flash_attention_works() -> bool:
    """Whether the compiled function is there: the package can install without it."""
    try:
        importlib.import_module("flash_attn_2_cuda")
    except Exception:
        return False
    return True


def _simulator() -> str:
    from sim.simulate import simulate
    from tasp_lab.machines.machine import Machine
    from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    from tasp_lab.topology.builders import full_mesh

    mesh = full_mesh(2)
    simulate(ring_all_gather(mesh, 1), Machine(mesh))
    return "works"


def _emulated_fabric() -> str:
    if importlib.util.find_spec("pyroute2") is None or importlib.util.find_spec("torch") is None:
        return "needs the packages of the extra 'runtime'"
    from runtime.fabric.emulated import missing_here

    missing = missing_here()
    return "works" if missing is None else f"does not work here: {missing}"
