"""The forward pass of an attention layer on one rank: queries, the memory of keys and values, and the running result.

The memory format is [positions, 2, batch, kv_heads, head_dim], K and V of a position being adjacent. Contiguous blocks
of any sizes therefore form one tensor of keys and one of values, and nothing needs to be concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.executor.executor import Executor
from runtime.kernels.registry import Kernel
from runtime.sequence_parallel.lse_merge import Accumulator
from tasp_lab.schedule.buffer_layout import CallRow
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.layer import Workload

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by the names of `tasp_lab.workload.layer`."""


class Layer:
    """One rank's layer in the forward pass. Use a new instance for each run.

    `q` is [batch, positions of the shard, heads, head_dim], of any strides, and is not copied.
    """

    def __init__(self, schedule: Schedule, rank: int, q: torch.Tensor, kernel: Kernel, scale: float) -> None:
        assert schedule.task is not None, "a schedule of attention has a task"
        self._workload, self._count = schedule.task.workload, schedule.task.count
        self._q, self._kernel, self._scale = q, kernel, scale
        self._first = first_positions(schedule.task, rank)
        self._result = Accumulator(q.shape[0], q.shape[1], q.shape[2], q.shape[3], q.device)

    def call(self, row: CallRow, keys: torch.Tensor) -> None:
        """Make a kernel call: attend to contiguous keys, given as bytes, and merge the result."""
        first = self._first[int(row.call.queries[0])]
        rows = int(self._count[row.call.queries].sum())
        k, v = keys_and_values(keys, self._workload)
        q = self._q[:, first : first + rows]
        partial = self._kernel.attend(q, k, v, scale=self._scale, low=row.call.low, high=row.call.high)
        self._result.add(first, partial)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, as `q` in shape and dtype, and the log-sum-exp [batch, positions, heads], float32."""
        return self._result.result(self._q.dtype)


def first_positions(task: AttentionTask, rank: int) -> Mapping[int, int]:
    """The offset of each stationary block in its rank's shard."""
    own = task.stationary[task.owner[task.stationary] == rank]
    ends = task.count[own].cumsum().tolist()
    return dict(zip(own.tolist(), [0, *ends], strict=False))


def keys_and_values(keys: torch.Tensor, workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of bytes of a memory as K and V, [batch, positions, kv_heads, head_dim] each."""
    rows = keys.view(DTYPES[workload.dtype]).view(-1, 2, workload.batch, workload.kv_head_count, workload.head_dim)
    return rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)


def store_keys_and_values(executor: Executor, workload: Workload, k: torch.Tensor, v: torch.Tensor) -> None:
    """Copy a rank's keys and values, [batch, positions of the shard, kv_heads, head_dim], into its memory."""
    resident = executor.memory[: k.shape[1] * workload.kv_bytes_per_position]
    for place, values in zip(keys_and_values(resident, workload), (k, v), strict=True):
        place.copy_(values)
