"""Functions from schedules to schedules. What they make is proven like any other schedule.

- `in_sequence`: one schedule after another, on the same blocks.
- `replicated`: one schedule in several groups of ranks at once.
- `over_groups`: a collective on two levels, within groups of ranks and between them.
- `in_chunks`: all blocks cut into chunks, or groups of heads, that follow each other by a step.
- `stacked`: layers of a network, each computed from the results of the one before; forward, backward or both.

There is no barrier between what is composed: a transfer or call waits only for what it needs.
"""

from tasp_lab.schedule.composition.groups import over_groups, replicated
from tasp_lab.schedule.composition.layers import in_chunks, stacked
from tasp_lab.schedule.composition.sequence import in_sequence

__all__ = ["in_sequence", "replicated", "over_groups", "in_chunks", "stacked"]
