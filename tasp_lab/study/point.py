"""Points of a study, questions about a layer or a plan by names with the values of axes as labels; and their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import StudyError
from tasp_lab.planning.changes import Job
from tasp_lab.planning.plan import PLAN_COLUMNS
from tasp_lab.prediction.answer import Status
from tasp_lab.prediction.columns import columns, names
from tasp_lab.prediction.question import Question, Value
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.kernel_shapes import Passing
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import Window
from tasp_lab.workload.models.catalogue import load_model

AS_IS = "as is"
"""The variant in which nothing is changed."""


@dataclass(frozen=True)
class Point(Question):
    """A question that a file can ask: its machine and its schedule are names.

    With a `job` it asks which layout trains a model fastest, with this attention schedule or `ANY`; the work is then
    an attention layer of the model. The array engine is the faster one where no events are asked for.
    """

    machine: str
    schedule: str
    work: Workload
    engine: Literal["auto", "simpy", "array"] = "array"
    job: Job | None = None

    def inputs(self) -> dict[str, object]:
        found = super().inputs()
        return found if self.job is None else found | {"job": msgspec.to_builtins(self.job)}

    @property
    def on(self) -> tuple[object, ...]:
        """What its machine follows from: the name, the variant, and the settings of the section ``[machine]``."""
        rest = self.library, self.kernel, self.stack, self.contention, self.sampling
        return self.machine, (*self.overrides, *(f"without {part}" for part in self.without)), *rest


def _whole_numbers(of: type) -> list[str]:
    """The fields of a data class that are whole numbers."""
    return [name for name, kind in get_type_hints(of).items() if kind in (int, int | None, Window | None)]


LAYER_NUMBERS = {"seq" if name == "sequence" else name: name for name in _whole_numbers(Workload)}
"""Axes that are whole numbers of a layer, to the fields of `tasp_lab.workload.layer.Workload`."""

LAYER_FIELDS = tuple(each.name for each in fields(Workload) if each.name not in ("sequence", "documents"))
LAYER = ("model", "seq", *LAYER_FIELDS, "pass")
"""Axes of the section ``[layer]``."""

OPTIONS = tuple(each.name for each in fields(AttentionOptions) if each.name != "passes")
"""Axes of the section ``[schedule]``, beside its name."""

_EXAMPLES = {"library": "nccl", "kernel": "flash-attention-3", "stack": "megatron", "without": "nic.0, gpu.5"}
SETTINGS = (*_EXAMPLES, "contention")
"""Axes of the section ``[machine]``, beside its name."""


PLAN = tuple(each.name for each in fields(Job) if each.name != "model")
"""Axes of the section ``[plan]``, which makes a study one of plans; with it, layers have a model and a length alone."""


def job_of(values: Mapping[str, Value]) -> Job | None:
    """The job of a plan; None where these values ask about a layer. Raises `TaspLabError`."""
    if "batch_tokens" not in values:
        return None
    _check_whole(values, _whole_numbers(Job))
    return Job(load_model(str(values["model"])), **_given(values, PLAN))


def layer_of(values: Mapping[str, Value]) -> Workload:
    """The layer of these values; of a model by name, with what is given beside it instead.

    >>> layer_of({"seq": 8192, "heads": 8, "mask": "causal"}).mask
    'causal'

    Raises `WorkloadError` and `StudyError`.
    """
    _check_whole(values, LAYER_NUMBERS)
    sequence, given = _given({"seq": 0} | dict(values), ["seq"])["seq"], _given(values, LAYER_FIELDS)
    if (model := values.get("model")) is None:
        return Workload(sequence, **given)
    return load_model(str(model)).layer(sequence, **given)


def _given(values: Mapping[str, Value], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _check_whole(values: Mapping[str, Value], names: Iterable[str]) -> None:
    for name in names:
        value = values.get(name)
        if name == "window" and isinstance(value, str):  # keys before and after, which the layer reads
            continue
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise StudyError(f"{name}: {value!r}, expected a whole number such as 8192 or 128Ki")


def cells_of_layer(layer: Workload) -> dict[str, Value]:
    """The columns of a layer in rows, which filters may name, too."""
    names = ("batch", "heads", "head_dim", "dtype", "mask", "kind")
    return {"seq": layer.sequence, "kv_heads": layer.kv_head_count, **{name: getattr(layer, name) for name in names}}


def passes_of(asked: Pass) -> tuple[Passing, ...]:
    """The passes one by one."""
    return ("forward", "backward") if asked == "both" else (asked,)


def options_of(values: Mapping[str, Value]) -> AttentionOptions:
    """The options of the schedule, and the passes. Raises `ScheduleError`."""
    passes: Any = values.get("pass", "forward")
    try:
        return AttentionOptions(passes, **_given(values, OPTIONS))
    except TypeError as error:
        raise StudyError(f"schedule: {error}") from error


def settings_of(values: Mapping[str, Value]) -> dict[str, Any]:
    """Library, kernel, stack, contention, and the parts that are missing. Raises `StudyError`."""
    found = _given(values, SETTINGS)
    for name, example in _EXAMPLES.items():
        if not isinstance(found.get(name, ""), str):
            raise StudyError(f"{name}: {found[name]!r}, expected a text such as {example!r}")
    if "contention" in found:
        if found["contention"] not in ("on", "off"):
            raise StudyError(f"contention: {found['contention']!r}, expected 'on' or 'off'")
        found["contention"] = found["contention"] == "on"
    if "without" in found:
        found["without"] = tuple(part.strip() for part in found["without"].split(",") if part.strip())
    return found


Row = Mapping[str, Value]
"""Cells by column. Times are in seconds, sizes in bytes."""

STATUSES: tuple[Status, ...] = get_args(Status)
"""Of rows, see `tasp_lab.prediction.answer.Status`; what failed is asked again by the next run."""

PREDICTED: tuple[Status, ...] = ("ok", "settled")
"""Statuses of rows with a time or a bound."""

COLUMNS = names("study")
"""Columns of all rows, see `tasp_lab.prediction.columns`; further axes of a study have columns of their own."""

OF_PLANS = tuple(column.name for column in PLAN_COLUMNS)
"""Columns of the rows of plans besides; their `schedule` is the recommended layout in words."""

POINT_COLUMNS = tuple(column.name for column in columns("study") if column.tells_apart)
"""Columns that say which point it is, with those of further axes."""
