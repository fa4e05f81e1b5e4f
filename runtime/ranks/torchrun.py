"""Ranks started by torchrun: this process is one of them and every rank runs the same program.

The backend is NCCL (RCCL on AMD) if every rank of this node has its own GPU; all nodes must be identical. gloo is used
where neither the host nor the machine has GPUs, and on request.

A rank that fails leaves its group as it is: `torch.distributed.destroy_process_group` waits for the other ranks, which
wait for this one. Its error is printed, and `tasp_lab.core.process` ends the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from runtime.executor.messages import Group, call_all, reason_of
from runtime.executor.transports import LAUNCH_ORDER, gpu_libraries
from runtime.linux import has_gpus
from runtime.protocol.jobs import Job, Result, Value
from runtime.ranks.run_job import perform
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError
from tasp_lab.core.process import at_once

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")

START_LIMIT = timedelta(seconds=120)
"""Within this time all ranks must have joined."""

COLLECTIVE_LIMIT = timedelta(minutes=10)
"""Within this time after the first rank all others must have called a collective: the checks of a result, or a
checkpoint, may delay one of them. NCCL's watchdog then ends the process. It is torch's own limit for NCCL."""

HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""torch's variable for the priority of the streams on which NCCL's kernels run, in all groups."""

ON_GPUS = {LAUNCH_ORDER: "1", HIGH_PRIORITY: "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "GPU_MAX_HW_QUEUES": "8"}
"""Variables that are set on GPUs unless they are: the order of several communicators, the priority of messages over
kernels that have filled the GPU, GPUs numbered as in the topologies that are imported, by their PCI bus, and on AMD as
many hardware queues per priority as a schedule of three channels has streams: streams that share one run one after
another, and the default is 4 (https://github.com/ROCm/rocm-systems/pull/8916)."""


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide GPUs from torch."""


class TorchrunRanks:
    """The ranks of the process group; see `runtime.protocol.jobs.Ranks`. Results are gathered on every rank.

    Messages of schedules go through `group`, another one of all ranks, if there is one.
    """

    def __init__(self, group: Group = None) -> None:
        self._group = group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    @property
    def is_reporter(self) -> bool:
        """See `runtime.protocol.jobs.Ranks`: every rank runs the same program, rank 0 reports."""
        return self.rank == 0

    @property
    def environment(self) -> Mapping[str, object]:
        """See `runtime.protocol.jobs.Ranks`: those of this rank."""
        found: dict[str, object] = {"backend": dist.get_backend(), "device": "cpu"}
        if found["backend"] == "nccl":
            found |= {"device": torch.cuda.get_device_name(), "gpu_libraries": gpu_libraries()}
        return found

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """Perform the job with all ranks. Raises `RunError` if a rank is lost or silent for `longest_silence_s`."""
        own = perform(job, longest_silence_s, lambda peer: None, self._group)
        results: list[Result] = [None] * self.world_size
        call_all("after a job", dist.all_gather_object, results, own)
        return results

    def agree(self, value: Value) -> Value:
        """See `runtime.protocol.jobs.Ranks`. All ranks return rank 0's value."""
        shared = [value]
        call_all("when all agree", dist.broadcast_object_list, shared, src=0)
        return shared[0]


def started_ranks() -> int:
    """How many ranks torchrun has started, known before they join.

    Raises `RunError` if this process is none of them, and for variables that are no numbers.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise RunError(
            f"not started by torchrun ({missing[0]} is not set): torchrun --nproc-per-node N -m tasp_lab.cli ..."
        )
    for name in _NUMBERS:
        if not os.environ.get(name, "0").isdecimal():
            raise RunError(f"{name} is {os.environ[name]!r}, expected a number, as torchrun sets it")
    return int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def join(backend: BackendKind = "auto", gpu_machine: str | None = None) -> Iterator[TorchrunRanks]:
    """Join the process group described by torchrun's environment variables.

    `gpu_machine` is the name of the machine that is to be measured, if it is one with GPUs.

    Raises `RunError`, also where gloo would be used though GPUs were meant, on a host with GPUs or for a `gpu_machine`;
    with the `backend` ``gloo`` it is used. Where the context ends with an error, the group is not destroyed, and the
    process is to end by `tasp_lab.core.process.leave`.
    """
    started_ranks()
    chosen = choose_backend(backend, gpu_machine)
    try:
        if chosen == "nccl":
            _set_variables()
            torch.cuda.set_device(_local_rank())
        dist.init_process_group(chosen, timeout=START_LIMIT, **(_nccl_options() if chosen == "nccl" else {}))
        if chosen == "gloo":
            dist.barrier()  # a rank that ends at once must not fail one that still connects
    except (RuntimeError, ValueError) as error:
        if chosen == "nccl":
            at_once()  # what there is of the group may wait for other ranks
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = reason_of(error)
        raise RunError(f"rank {os.environ['RANK']}: cannot join the process group at {where}: {reason}") from None
    try:
        distributed_c10d._set_pg_timeout(COLLECTIVE_LIMIT)
        distributed_c10d._get_default_store().set_timeout(COLLECTIVE_LIMIT)  # where further groups are made
        yield TorchrunRanks()
    except BaseException:
        at_once()
        raise
    dist.destroy_process_group()


def choose_backend(backend: BackendKind, gpu_machine: str | None = None) -> BackendKind:
    """``nccl`` or ``gloo`` for the ranks of this host; see `join`. Raises `RunError`.

    On a host with GPUs `ON_GPUS` are set before torch counts them: to count them may start HIP or CUDA, which read
    their variables only then.
    """
    if backend == "nccl" or (backend == "auto" and has_gpus()):
        _set_variables()
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if backend == "gloo" or (ranks <= gpus and dist.is_nccl_available()):
        return "gloo" if backend == "gloo" else "nccl"
    if backend == "auto" and gpu_machine is None and not gpus and not has_gpus():
        return "gloo"
    visible = next((f" ({name}={os.environ[name]})" for name in VISIBLE if name in os.environ), "")
    nccl = "" if dist.is_nccl_available() else " and has no NCCL"
    seen = f"sees {gpus} GPU{'s' * (gpus != 1)} here{visible}{nccl}"
    found = f"{ranks} rank{'s' * (ranks > 1)} on this host, but torch {torch.__version__} {seen}"
    meant = "" if gpu_machine is None else f"{gpu_machine} has GPUs: "
    raise RunError(f"{meant}{found}; expected a GPU for each rank, or --backend gloo to use gloo on CPUs instead")


def _set_variables() -> None:
    for name, value in ON_GPUS.items():
        os.environ.setdefault(name, value)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _nccl_options() -> dict[str, Any]:
    """The GPU of this rank, which torch would else guess from its rank, and the priority of NCCL's stream.

    With `device_id` the communicator of all ranks is made at once. Before torch 2.7.1 it could then hang
    (https://github.com/pytorch/pytorch/issues/153960).
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = os.environ[HIGH_PRIORITY] == "1"
    options._timeout = START_LIMIT
    return {"device_id": torch.device("cuda", _local_rank()), "pg_options": options}
