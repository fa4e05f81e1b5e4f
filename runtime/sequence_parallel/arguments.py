"""Arguments of the public functions: what they may be, checked before a rank waits for another one.

    check_arguments({"window": 8.7}, TYPES)      # raises WorkloadError
    check_tensor("q", dtensor)                   # as does this: expected a plain tensor, as q.to_local() gives

Messages and kernels need plain tensors with data. Tensors of torch that are none are refused by name, with what makes
plain ones of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.device_mesh import DeviceMesh

from runtime.executor.messages import Group
from tasp_lab.core.arguments import Argument, arguments_of
from tasp_lab.core.errors import RunError, ScheduleError, TopologyError, WorkloadError, of_type
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

_FLAG = Argument((bool, np.bool_), "True or False", WorkloadError)
_LAYOUT = Argument((SequenceLayout,), "a SequenceLayout, as tasp_lab.workload.sequence_layout makes", WorkloadError)

TYPES: Mapping[str, Argument] = {
    **arguments_of(Workload, WorkloadError),
    **arguments_of(AttentionOptions, ScheduleError),
    "window": arguments_of(Workload, WorkloadError)["window"]._replace(types=(Integral, tuple, list, NoneType)),
    "schedule": Argument((str, Schedule, Passes), "the name of a schedule, a Schedule or Passes", ScheduleError),
    "topology": Argument((Topology, NoneType), "a Topology or None", TopologyError),
    "sinks": Argument((torch.Tensor, NoneType), "a torch.Tensor or None", WorkloadError),
    "scale": Argument((Real, NoneType), "a number or None", WorkloadError),
    "kernel": Argument((str,), "the name of a kernel", RunError),
    "transport": Argument((str,), "the name of a transport", RunError),
    "options": Argument((AttentionOptions,), "AttentionOptions", ScheduleError),
    "causal": _FLAG,
    "return_final_state": _FLAG,
    "before": _LAYOUT,
    "after": _LAYOUT,
    "layout": _LAYOUT,
    "rank": Argument((Integral,), "a whole number", WorkloadError),
}
"""The arguments of the public functions, by name, see `tasp_lab.core.arguments`."""

TIMEOUT_S = 300.0
"""How long a rank waits for another one unless the caller gives a time."""

_LEAST_S, _MOST_S = 1e-3, 1e9
"""torch counts timeouts in milliseconds. Nanoseconds since a machine has started, and 31 years more, fit in 64 bits."""


def is_timeout(timeout_s: object) -> bool:
    """Whether a rank can wait for so many seconds.

    >>> is_timeout(2), is_timeout(float("nan")), is_timeout(-1), is_timeout("2")
    (True, False, False, False)
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    return is_number and bool(_LEAST_S <= timeout_s <= _MOST_S)  # type: ignore[operator]


def check_timeout(timeout_s: object) -> None:
    """Raise `WorkloadError` unless `is_timeout`."""
    if not is_timeout(timeout_s):
        raise WorkloadError(of_type("timeout_s", timeout_s, f"a number of seconds, {_LEAST_S:g} to {_MOST_S:g}"))


def process_group(group: Group | DeviceMesh) -> Group:
    """The process group of a mesh of one dimension.

    Raises `RunError` for a mesh of several, `WorkloadError` for what is neither a group nor a mesh.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise RunError(f"group: a mesh of {group.ndim} dimensions, expected one of them, as in mesh['cp']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup | None) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise WorkloadError(of_type("group", group, "a process group, a DeviceMesh or None"))
    return group


_PLAIN = {"DTensor": "to_local()", "AsyncCollectiveTensor": "wait()"}
"""By subclass of tensors, the method that gives a plain one."""


def check_tensor(name: str, x: object) -> None:
    """Raise `WorkloadError` unless `x` is a dense tensor with data in the memory of its device."""
    if not isinstance(x, torch.Tensor):
        raise WorkloadError(of_type(name, x, "a torch.Tensor"))
    kind, expected = type(x).__name__, "a plain tensor"
    if x.is_nested:
        raise WorkloadError(f"{name} is a nested tensor, expected {expected}; cu_seqlens are for packed documents")
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        how = f", as {name}.{_PLAIN[kind]} gives" if kind in _PLAIN else ""
        raise WorkloadError(f"{name} is of type {kind}, expected {expected}{how}")
    if x.layout != torch.strided:
        raise WorkloadError(f"{name} is of layout {x.layout}, expected {expected}, as {name}.to_dense() gives")
    if x.is_meta:
        raise WorkloadError(f"{name} is on the device meta, expected {expected} with data")


def check_transforms(*tensors: Any) -> None:
    """Raise `WorkloadError` for calls inside of transforms of torch that no layer supports, such as vmap.

    `torch.func.grad` and `vjp` differentiate a layer as `backward` does. Forward-mode derivatives need kernels of their
    own, and the ranks would have to agree on how many samples they compute. Tensors that are None are left out.
    """
    found = {each.key().name for each in retrieve_all_functorch_interpreters()}
    transform = next((each for each in ("Vmap", "Jvp", "Functionalize") if each in found), None)
    given = [x for x in tensors if x is not None]
    if transform is None and any(torch._C._functorch.is_legacy_batchedtensor(x) for x in given):
        transform = "Vmap"
    if transform is None and any(unpack_dual(x).tangent is not None for x in given):  # type: ignore[no-untyped-call]
        transform = "Jvp"
    if transform is not None:
        raise WorkloadError(f"a layer inside of {_TRANSFORMS[transform]}, expected torch.func.grad, vjp or none")


_TRANSFORMS = {
    "Vmap": "torch.func.vmap (or jacrev, jacfwd, hessian, is_grads_batched)",
    "Jvp": "torch.func.jvp (or linearize, forward-mode differentiation)",
    "Functionalize": "torch.func.functionalize",
}
"""Transforms by their names in torch, and who uses them."""
