"""``tasp-lab calibrate``: a profile from measurements in files, or a machine file from running ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from tasp_lab.choices import FabricKind
from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import OUTPUT, RUN, WORK, Backend, Json, Scale
from tasp_lab.errors import OutputError
from tasp_lab.files import check_writable
from tasp_lab.progress import print_progress

_FILES = Group("Files", help="Without --fabric.", sort_key=2)


def calibrate(
    *measurements: Annotated[
        str,
        Parameter(
            group=WORK,
            help="Logs of nccl-tests, rccl-tests, TransferBench or p2pBandwidthLatencyTest, CSV tables, or folders of "
            "them; with --fabric a machine.",
        ),
    ],
    profile: Annotated[
        str | None,
        Parameter(
            group=_FILES, help="The profile to start from and, for logs, the machine: h100-8, h100-2x8, or my.toml:2x8."
        ),
    ] = None,
    fit: Annotated[
        tuple[str, ...],
        Parameter(
            group=_FILES,
            negative=(),
            show_default=False,
            help="A constant to fit, repeatable; all that the measurements identify, if not given.",
        ),
    ] = (),
    algorithm: Annotated[
        Literal["ring"] | None,
        Parameter(group=_FILES, help="The algorithm of AllReduce where the measurement does not name it."),
    ] = None,
    in_place: Annotated[
        bool, Parameter(group=_FILES, negative=(), show_default=False, help="Use in-place columns of logs.")
    ] = False,
    fabric: Annotated[
        FabricKind | None, Parameter(group=RUN, help="Measure running ranks instead of reading files: see validate.")
    ] = None,
    scale: Scale = None,
    backend: Backend = "auto",
    output: Annotated[
        Path | None,
        Parameter(group=OUTPUT, help="Write the profile (.toml), or with --fabric the machine (.toml, .json)."),
    ] = None,
    json: Json = False,
) -> None:
    """Fit a profile to your own measurements, or measure a machine.

    Shows which constants the measurements identify, with confidence intervals. With --fabric, links and launch cost
    are measured between pairs of ranks and written as a machine.

    Example: tasp-lab calibrate all_gather.log sendrecv.log --profile h100-8 --output my.toml

    Example: tasp-lab calibrate full-mesh:4 --fabric emulated --output my.json
    """
    from tasp_lab.analysis import calibrate as calibration

    _check_output(measurements, output, (".toml",) if fabric is None else (".toml", ".json"))
    found = calibration.calibrate(
        *measurements,
        profile=profile,
        fit=fit,
        algorithm=algorithm,
        in_place=in_place,
        fabric=fabric,
        scale=scale,
        backend=backend,
        progress=print_progress,
    )
    if not found.is_reporter:
        return
    if output is not None:
        found.save(output)
    if json:
        print_json(found.to_dict() | {"output": None if output is None else str(output)})
        return
    print_parts(found.parts())
    if output is not None:
        print_progress(f"{'profile' if fabric is None else 'machine'}: {output}")


def _check_output(measurements: Sequence[str], output: Path | None, endings: tuple[str, ...]) -> None:
    if output is None:
        return
    if output.suffix.lower() not in endings:
        raise OutputError(f"cannot write {output}: expected a name that ends in {' or '.join(endings)}")
    if os.path.realpath(output) in {os.path.realpath(text) for text in measurements}:
        raise OutputError(f"cannot write {output}: --output would replace what it is made from")
    check_writable(output)
