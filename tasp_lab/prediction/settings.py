"""What a question changes of its machine. This module imports nothing heavy: the command line lists the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tasp_lab.core.arguments import Option
from tasp_lab.core.choices import Routes
from tasp_lab.core.errors import OverrideError, ProfileError, TopologyError


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """Software, speeds and parts of a machine, other than as it is.

    What is not in the help, beside the types of the fields:

    Parameters
    ----------
    library : of a machine given by name, see `tasp_lab.machines.catalogue.load_machine`.
    stack : a name of `tasp_lab.machines.stack`; what it does not ship is refused, and `compare` leaves it out.
    contention : see `tasp_lab.machines.contention`; None where the machine has constants of it.
    compute : a rate in FLOP/s for all calls of a rank, or ``"timed:RATE"``.
    overrides : applied in order, see `tasp_lab.machines.overrides`.
    routes : instead of what the library does, see `tasp_lab.topology.routing`.
    without : parts of the overridden machine, by the names of the whole one, see `tasp_lab.topology.missing`.
    """

    library: Annotated[
        str,
        Option(
            "The communication library: auto (that of the machine), ideal (links alone), nccl, rccl or gloo; "
            "nccl==2.28 for a version, by default 2.29.2.",
            expected="the name of a library",
            error=ProfileError,
        ),
    ] = "auto"
    compute: Annotated[
        float | str | None,
        Option(
            "timed:300TFLOP/s: kernel calls take as long as at this rate; real: run the kernels (validate only). "
            "Default: the rates of the machine, or one marked as assumed; in validate on other fabrics than emulated: "
            "real.",
            expected="a rate in FLOP/s, or a text such as 'timed:300TFLOP/s'",
        ),
    ] = None
    kernel: Annotated[
        str | None,
        Option(
            "Kernel model of attention, such as flash-attention-3; tasp-lab profile show lists those of a machine. "
            "Default: that of the stack, or else of PyTorch.",
            expected="the name of a kernel",
            error=ProfileError,
        ),
    ] = None
    stack: Annotated[
        str | None,
        Option(
            "Software that runs attention, such as torch, megatron or trl, or a .toml file: its kernel, the host model "
            "of each schedule, and the schedules that it ships. Default: none, no host times.",
            expected="the name of a stack",
            error=ProfileError,
        ),
    ] = None
    contention: Annotated[
        bool | None,
        Option(
            "Whether messages slow concurrent kernel calls by taking multiprocessors. Default: on if the machine has "
            "the parameters."
        ),
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        Option(
            "Override a parameter of the machine or a field of the layer: nic.bandwidth=x2, link.bandwidth=900GB/s, "
            "port.latency=+1us, link.0-1=x0.5, compute.rate=x0.9, layer.kv_heads=1, of steps also gpu.memory=40GiB; "
            "repeatable.",
            flag="set",
            error=OverrideError,
        ),
    ] = ()
    without: Annotated[
        tuple[str, ...],
        Option(
            "Remove a part of the machine: link.0-3 both ways, link.0>3 one way, nic.3 (its ranks use the nearest NIC "
            "that is left), gpu.5; repeatable.",
            error=TopologyError,
        ),
    ] = ()
    routes: Annotated[
        Routes | None,
        Option(
            "Where ranks are not linked, others forward over the shortest routes: all in turn, or the first one; "
            "direct: none forward. Default: all; with NCCL through one rank at most, with RCCL direct.",
            error=TopologyError,
        ),
    ] = None


AS_IS = MachineSettings()
"""The machine as it is."""
