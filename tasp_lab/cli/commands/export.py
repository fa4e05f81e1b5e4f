"""``tasp-lab export``: a schedule as a file of another engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tasp_lab.cli.console import print_json
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    DEFAULT_RINGS,
    NO_CHANGES,
    OUTPUT,
    WORK,
    ExpressionNumbers,
    Json,
    PartChoice,
    RingChoice,
    ShardBytes,
    TopologyText,
    of,
)
from tasp_lab.cli.options_layer import DEFAULT_LAYER, LayerChoice
from tasp_lab.core.choices import ExportFormat
from tasp_lab.core.errors import OutputError
from tasp_lab.rings.options import RingOptions

DEFAULT_SHARD_BYTES = "20160KiB"
"""5040 pages: parts of most numbers of rings are equal."""


def export(
    topology: TopologyText,
    /,
    *,
    schedule: Annotated[str, of(WORK)],
    format: Annotated[ExportFormat, of(OUTPUT)],
    shard_bytes: ShardBytes = None,
    layer: LayerChoice = DEFAULT_LAYER,
    numbers: ExpressionNumbers = DEFAULT_NUMBERS,
    changes: PartChoice = NO_CHANGES,
    rings: RingChoice = DEFAULT_RINGS,
    output: Annotated[Path | None, of(OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Write a collective, or the data that a layer moves, as a plan of another engine.

    Plans of MSCCL and MSCCL++ hold for any size; by default the number of chunks is that of 20160 KiB per rank, which
    most numbers of rings divide.

    Example: tasp-lab export full-mesh:8 --schedule multi-ring --format msccl-xml --output multi-ring.xml

    Example: tasp-lab export h100-8 --schedule ulysses --seq 64Ki --format msccl++ --output ulysses.json

    Example: tasp-lab export torus:4x4 --schedule trees --shard-bytes 1MiB --format chakra --output trees

    Args:
        schedule: The schedule, as in predict.
        format: msccl++: an execution plan (JSON). msccl-xml: of msccl-executor-nccl and RCCL. chakra: traces for
            ASTRA-sim, OUTPUT.RANK.et for each rank. nccl-graph: the rings, for NCCL_GRAPH_FILE. nccl-tuner: rules for
            NCCL's tuner plugin (CSV).
        output: The file. Default: standard output, of chakra none.
    """
    from tasp_lab.core.files import check_writable, write_whole
    from tasp_lab.core.progress import print_progress
    from tasp_lab.formats.export import export as export_schedule
    from tasp_lab.prediction.inputs import changed_machine
    from tasp_lab.schedules.registry import uses_rings

    if output is not None:
        check_writable(output)
    elif format == "chakra":
        raise OutputError("chakra: traces are binary files, one for each rank; expected --output")
    with limited_memory():
        machine = changed_machine(numbers.load(topology, "auto"), changes.overrides, changes.without)
        if shard_bytes is None and format != "chakra" and layer == DEFAULT_LAYER:
            shard_bytes = DEFAULT_SHARD_BYTES
        work = layer.work(shard_bytes)
        found = RingOptions(**vars(rings)).find(machine.topology) if uses_rings(schedule) else None
        files = export_schedule(machine, schedule, work, format, found, layer.options())
    written = {}
    for suffix, content in files.items():
        if output is not None:
            path = output.with_name(output.name + suffix)
            write_whole(path, content)
            written[str(path)] = len(content)
    if json:
        print_json(
            {"format": format, "files": written} if output is not None else {"format": format, "text": _text(files)}
        )
    elif output is None:
        sys.stdout.write(_text(files))
    else:
        first, *others = written
        print_progress(f"{format}: {first}" + (f" and {len(others)} more" if others else ""))


def _text(files: dict[str, bytes]) -> str:
    """The text of the one file of a format."""
    (content,) = files.values()
    return content.decode()
