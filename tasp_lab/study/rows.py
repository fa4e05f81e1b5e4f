"""Rows of a study: one per point, with everything needed to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from tasp_lab.prediction.answer import Status
from tasp_lab.prediction.question import Value

Row = Mapping[str, Value]
"""Cells by column. Times are in seconds, sizes in bytes."""

STATUSES: tuple[Status, ...] = get_args(Status)
"""Of rows, see `tasp_lab.prediction.answer.Status`; what failed is asked again by the next run."""

PREDICTED: tuple[Status, ...] = ("ok", "settled")
"""Statuses of rows with a time or a bound."""

WHO = ("key", "machine", "nodes", "ranks", "library", "model", "seq", "batch", "heads", "kv_heads", "head_dim", "dtype")
"""Columns that say which point it is, with those of `WHAT`; further axes of a study have columns of their own."""

WHAT = ("mask", "kind", "passes", "schedule", "variant", "overrides")

TIMES = (
    *("time_s", "time_low_s", "time_high_s", "order_spread"),
    *("compute_s", "communication_s", "exposed_s", "bound_s"),
)
"""`compute_s` is the time without messages, `communication_s` that without compute, `exposed_s` the time minus
`compute_s`. `order_spread` is the standard deviation of log(measured / predicted) that schedules on one machine do not
have in common (`tasp_lab.prediction.residual_fit.Residual.own`): which of two is faster depends on it alone."""

REST = (
    "bottleneck",
    "bytes_per_rank",
    "buffer_bytes",
    "memory_bytes",
    "fits",
    "engine",
    "settled_by",
    "search_complete",
)
"""`bottleneck` is the largest part of the critical path; `settled_by` is ``simulation`` or ``bound``."""

HISTORY = ("version", "models", "constants", "digest", "status", "error", "inputs")
"""`models` is `tasp_lab.core.version.MODEL_VERSION`, `constants` the hash of the machine, `digest` that of the
schedules that were built, `inputs` are those of the point as JSON."""

COLUMNS = (*WHO, *WHAT, *TIMES, *REST, *HISTORY)
