"""What packages above do for those below."""

from __future__ import annotations

import tasp_lab
from tasp_lab.core.lazy import ABOVE, from_above
from tasp_lab.schedules.files import READERS


def test_every_task_has_a_function_and_every_kind_of_file_a_task() -> None:
    assert tasp_lab.__version__
    assert all(callable(from_above(task)) for task in ABOVE)
    assert {f"schedule of {end}" for end in READERS} <= set(ABOVE)
