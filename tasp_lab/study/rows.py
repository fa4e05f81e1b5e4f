"""Rows of a study: one per point, with everything needed to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from tasp_lab.prediction.answer import Status
from tasp_lab.prediction.columns import columns, names
from tasp_lab.prediction.question import Value

Row = Mapping[str, Value]
"""Cells by column. Times are in seconds, sizes in bytes."""

STATUSES: tuple[Status, ...] = get_args(Status)
"""Of rows, see `tasp_lab.prediction.answer.Status`; what failed is asked again by the next run."""

PREDICTED: tuple[Status, ...] = ("ok", "settled")
"""Statuses of rows with a time or a bound."""

COLUMNS = names("study")
"""Columns of all rows, see `tasp_lab.prediction.columns`; further axes of a study have columns of their own."""

POINT_COLUMNS = tuple(column.name for column in columns("study") if column.tells_apart)
"""Columns that say which point it is, with those of further axes."""
