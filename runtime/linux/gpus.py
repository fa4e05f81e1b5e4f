"""The GPUs of this host as its operating system shows them, and the variables of their libraries. Without torch."""

from __future__ import annotations

import os
from pathlib import Path

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
    """The version of the driver as its file says it; None without one."""
    for name in DRIVERS:
        try:
            return Path(name).read_text().splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return None


def library_variables() -> dict[str, str]:
    """The variables of the environment that libraries for GPUs and communication read."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)}
