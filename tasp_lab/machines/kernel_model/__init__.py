"""The time of attention kernels by shape, from few physical constants.

- `AttentionKernel` is one named kernel on one GPU; `attention_kernel` finds it
  (`tasp_lab.machines.kernel_model.catalogue`).
- `tasp_lab.machines.kernel_model.tiles` cuts a call into tiles and hands them out over the SMs.

Constants are in ``data/``: a file per GPU and kernel, each constant with its value, interval and source.
"""

from tasp_lab.machines.kernel_model.catalogue import attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.kernel import AttentionKernel, TimeParts

__all__ = ["AttentionKernel", "TimeParts", "attention_kernel", "gpu_names", "kernel_names"]
