"""What each failure of a part costs on four machines: lost or slow GPUs, NICs, ports, links and nodes.

``python -m experiments.tables.failures`` writes ``experiments/results/failures.md`` in a few minutes.
"""

from __future__ import annotations

from experiments.common import RESULTS, markdown, write_page
from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import print_progress
from tasp_lab.prediction.failures import failures
from tasp_lab.workload.layer import Workload

MACHINES = ("h100-4x8", "mi300x-8", "gb200-nvl72", "torus:4x4")

LAYER = Workload(131072, heads=32, kv_heads=8, mask="causal")

HEAD = """\
What each single failure costs a layer of Llama 3 8B, forward, of 128Ki positions, made by `python -m \
experiments.tables.failures`: predicted, not measured. Unchanged, the schedule that `compare` recommends for the whole \
machine goes on with its options on what is left. The best schedule then is the fastest of \
those that `compare` compares there. Of parts that are alike the dearest is shown; its factor begins with that of the \
part alike that costs least. `docs/what_if.md` says how to read it."""


def page() -> str:
    """The page of Markdown."""
    parts = [HEAD]
    for name in MACHINES:
        print_progress(name)
        found = failures(name, LAYER, jobs=min(2, usable_cores()))
        parts += [f"## {name}", markdown(found.parts())]
    return "\n\n".join(parts)


if __name__ == "__main__":
    write_page(RESULTS / "failures.md", page())
