"""``tasp-lab decompose``: the rings of a topology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    DEFAULT_RINGS,
    NO_CHANGES,
    ExpressionNumbers,
    Json,
    LinkEdits,
    RingChoice,
    TopologyText,
    plot,
)
from tasp_lab.cli.outputs import check_outputs, write_picture
from tasp_lab.core.progress import on_one_line, print_progress


def decompose(
    topology: TopologyText,
    /,
    *,
    numbers: ExpressionNumbers = DEFAULT_NUMBERS,
    changes: LinkEdits = NO_CHANGES,
    rings: RingChoice = DEFAULT_RINGS,
    plot: Annotated[Path | None, plot("the rings")] = None,
    json: Json = False,
) -> None:
    """Decompose a topology into rings and compare them with the AllGather bound.

    The rings are those with the highest total bandwidth.

    Example: tasp-lab decompose full-mesh:5 --without-link 0-3
    """
    from tasp_lab.prediction import decompose as decomposition

    with limited_memory():
        machine = numbers.load(topology, "ideal")
        check_outputs(plot=plot, topology=topology)
        found = decomposition.decompose(
            machine,
            without_links=changes.without_link,
            links=changes.link,
            **vars(rings),
            progress=print_progress,
        )
    if plot is not None:
        from tasp_lab.plots.rings import draw_decomposition

        write_picture(draw_decomposition(found, on_one_line(f"Rings of {found.topology.name}")), plot)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
