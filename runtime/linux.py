"""System calls that this package needs: namespaces, the end of a parent process; clock, load and versions of the host.

Namespaces are made by calls to the C library that Python 3.11 does not wrap.

This module must not import torch or numpy, as a process that joins a user namespace must be single-threaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from functools import cache
from importlib import metadata
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces. Raises `OSError`."""
    if _libc.unshare(flags) != 0:
        _raise_errno("unshare")


def join_namespace(descriptor: int, kind: int) -> None:
    """Move the calling thread into the namespace of a descriptor. Raises `OSError`."""
    if _libc.setns(descriptor, kind) != 0:
        _raise_errno("setns")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Request a signal for this process when its parent ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        _raise_errno("prctl")


def enter_user_namespace() -> None:
    """Become root of a new user namespace, which allows network namespaces without privileges. Raises `OSError`."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as stream:
            stream.write(text)


def _raise_errno(call: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")


# The clock and the load of the host.


@cache
def clock_name() -> str:
    """A name that processes share if their monotonic clocks are one: the boot of a host, else the host."""
    boot = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(boot):
        return platform.node()
    with open(boot) as stream:
        return stream.read().strip()


class BusyShare:
    """The busy share of all cores, by any process, since construction; 0 without ``/proc/stat``."""

    def __init__(self) -> None:
        self._began = _ticks()

    def so_far(self) -> float:
        busy, total = (now - then for now, then in zip(_ticks(), self._began, strict=True))
        return busy / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Busy ticks and total ticks of all cores since boot."""
    if not os.path.exists("/proc/stat"):
        return 0, 0
    with open("/proc/stat") as stream:
        ticks = [int(value) for value in stream.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


# The GPUs of this host as its operating system shows them, and the variables of their libraries. Without torch.


DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""The devices that the drivers of NVIDIA and of AMD make."""

DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
"""Files with the version of a loaded driver."""

PREFIXES = (
    "NCCL_", "RCCL_", "TORCH_NCCL_", "CUDA_", "HIP_", "ROCR_", "HSA_", "GPU_", "GLOO_", "FLASH_ATTENTION_",
    "PYTORCH_CUDA_", "PYTORCH_HIP_", "OMP_NUM_THREADS",
)  # fmt: skip
"""The first letters of the variables that libraries for GPUs and communication read."""


def has_gpus() -> bool:
    """Whether a driver of GPUs is loaded, whatever torch finds."""
    return any(os.path.exists(device) for device in DEVICES)


def driver_version() -> str | None:
    """The version of the driver, from its file; None without one."""
    for name in DRIVERS:
        try:
            return Path(name).read_text().splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return None


def library_variables() -> dict[str, str]:
    """The variables of the environment that libraries for GPUs and communication read."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)}


def host_environment() -> dict[str, object]:
    """The host, the versions and the variables behind a measurement; without the name of the host."""
    return {
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "kernel": platform.release().partition("-")[0],
        "cores": os.cpu_count(),
        "gpu_driver": driver_version(),
        "variables": library_variables(),
    }


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None without it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
