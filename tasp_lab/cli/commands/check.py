"""``tasp-lab check``: whether the bandwidth in a log is normal, and what slows it down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tasp_lab.cli.console import tell
from tasp_lab.cli.options import MACHINE, WORK, Csv, Json, Wide, flag, of, plot
from tasp_lab.cli.outputs import check_outputs, write_picture, write_rows
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.files import check_writable
from tasp_lab.core.progress import print_progress


def check(
    *logs: Annotated[Path, of(WORK)],
    expected: Annotated[str | None, of(WORK)] = None,
    machine: Annotated[str | None, of(MACHINE)] = None,
    overrides: Annotated[tuple[str, ...], flag(MACHINE, name="--set")] = (),
    plot: Annotated[Path | None, plot("measured times over what is expected")] = None,
    csv: Csv = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Say whether the bandwidth in a log is normal, and what most likely slows it down.

    Reads logs of nccl-tests and rccl-tests, of p2pBandwidthLatencyTest and TransferBench, and CSV tables of
    collectives; several logs of one machine together say more than one. The exit code is 1 where the machine is slow.

    Example: tasp-lab check all_reduce.log

    Example: tasp-lab check all_reduce.log --machine a100-2x8 --set nic.bandwidth=25GB/s

    Example: tasp-lab check --expected h100-8

    Args:
        logs: Files of one machine.
        expected: Print what a machine should reach instead: h100-8, mi300x-2x8 or my.toml:2x8.
        machine: The machine of the logs: h100-8, h100 or my.toml:2x8. Default: by the GPUs that they list.
        overrides: A number of the machine that is known to be different, such as nic.bandwidth=25GB/s. Repeatable.
    """
    from tasp_lab.measure import check as of_logs

    check_outputs(plot=plot)
    if csv is not None:
        check_writable(csv)
    if expected is not None:
        if logs or machine or plot:
            raise QuantityError("--expected: takes no logs, --machine or --plot, expected a machine and --set alone")
        table = of_logs.expected(expected, overrides=overrides)
        tell(table, json, wide=wide)
        if csv is not None:
            write_rows(table.records(), csv)
        return 0
    found = of_logs.check(*logs, machine=machine, overrides=overrides, progress=print_progress)
    if plot is not None:
        from tasp_lab.plots.check import draw_check

        write_picture(draw_check(found), plot)
    tell(found, json, wide=wide)
    if csv is not None:
        write_rows(found.records(), csv)
    return 1 if found.verdict == "slow" else 0
