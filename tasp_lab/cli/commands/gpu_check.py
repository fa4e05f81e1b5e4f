"""``tasp-lab gpu-check``: the first hour on real GPUs, step by step, with one record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import OUTPUT, RUN, WORK, Json
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.progress import print_progress

if TYPE_CHECKING:
    from tasp_lab.validation.gpu_check import Record


def gpu_check(
    machine: Annotated[
        str | None,
        Parameter(
            group=WORK, help="The machine, such as h100-8, or a topology file. Default: a full mesh of the ranks."
        ),
    ] = None,
    /,
    *,
    quick: Annotated[
        bool, Parameter(group=RUN, negative=(), show_default=False, help="Smaller sizes and fewer runs.")
    ] = False,
    backend: Annotated[
        BackendKind,
        Parameter(group=RUN, help="auto: nccl (RCCL on AMD); gloo checks the logic on CPUs."),
    ] = "auto",
    output: Annotated[
        Path, Parameter(group=OUTPUT, help="The folder of the record, gpu-check.json and gpu-check.txt.")
    ] = Path("gpu-check"),
    json: Json = False,
) -> None:
    """Check the GPUs of a torchrun job step by step, and stop at the first failure.

    Example: torchrun --nproc-per-node 8 -m tasp_lab.cli gpu-check h100-8 --quick
    """
    from tasp_lab.validation.gpu_check import gpu_check as check

    def show(record: Record) -> None:
        if json:
            print_json(record.to_dict())
        else:
            print_parts(record.parts())

    found = check(machine, quick=quick, output=output, backend=backend, progress=print_progress, show=show)
    if found.is_reporter:
        show(found)
