"""The live map of a study: which schedule to take where, on a page with sliders that needs neither server nor Python::

    grid = live_map(folder.rows(), colors)
    script = map_script(grid)

The grid has the predictions of all points as compact arrays: logarithms of times and of expected regrets, as unsigned
16-bit numbers in base64. Between points ``live_map.js`` interpolates them linearly, in the logarithms of lengths and of
factors. It chooses as `tasp_lab.prediction.rank.choose` does, among the same regrets and by the same order.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.rank import TIE, by_costs
from tasp_lab.study.axis import factor_of, factor_text
from tasp_lab.study.frames import (
    costs_of,
    held_constant,
    is_number,
    plain,
    questions_of,
    text_of,
    title_of,
    varying,
    with_regrets,
)
from tasp_lab.workload.layer import Workload

if TYPE_CHECKING:
    import pandas as pd

Axis = Mapping[str, Any]
"""An axis of a grid, see `live_map`."""

Grid = dict[str, Any]
"""What ``live_map.js`` draws, ready for JSON, see `live_map`."""

MOST_CELLS = 400_000
"""A grid with more combinations of axes and schedules is not made; its arrays would take 3 MB."""

MOST_ERROR = 0.08
"""Axes are not interpolated if half of the times that every second value leaves out are missed by more than this.

At half the distance, that of the grid, linear interpolation errs by about a quarter of it: 2 %.
"""

NONE = 65535
"""In an array of 16 bits: a schedule that has no time at this point; in one of 8 bits 255 is."""

_IN_ORDER = ("machine", "model", "seq", "batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "mask",
             "window", "kind", "passes", "library", "kernel", "stack", "contention", "cached_keys")  # fmt: skip
FLAGS = {name: f"--{name.replace('_', '-')}" for name in _IN_ORDER} | {"machine": "", "passes": "--pass"}
"""The options of `tasp-lab compare` by column, in the order of the command; the machine has no name."""

DEFAULTS = {each.name: each.default for each in fields(Workload) if each.name not in ("mask", "heads")}
"""What `compare` takes without the option; a mask and heads are named all the same."""

OF_MODEL = ("heads", "kv_heads", "head_dim", "value_dim")
"""What a model sets."""


def live_map(rows: pd.DataFrame, colors: Mapping[str, str], left_out: pd.DataFrame | None = None) -> Grid | None:
    """The grid of a study's rows; None where nothing but the schedule varies, or for more than `MOST_CELLS`.

    ``axes`` are the columns that vary besides the schedule, each with its ``values``, their ``texts`` and their part of
    the command; those with ``between`` are interpolated. ``time`` and ``regret`` are arrays over these axes and
    ``schedules``, whose first index varies slowest: code times ``step`` plus ``low`` is the logarithm of the time in
    seconds, and of one plus the expected regret. ``order`` has the place of each schedule in the order by which ties
    are decided, ``bottleneck`` the index of its text in ``bottlenecks``. ``error`` is `interpolation_error`, of rows
    between those of the grid if there are some `left_out`.
    """
    rows = with_factors(rows)
    names = [name for name in varying(rows) if name != "schedule"]
    schedules = [name for name in colors if name in set(rows["schedule"])]
    axes = [_axis(name, rows) for name in names]
    shape = (*(len(axis["values"]) for axis in axes), len(schedules))
    if not axes or math.prod(shape) > MOST_CELLS:
        return None
    time, regret = np.full(shape, math.nan), np.full(shape, math.nan)
    order, bottleneck = np.full(shape, 255, np.uint8), np.full(shape, 255, np.uint8)
    places = [{value: place for place, value in enumerate(axis["values"])} for axis in axes]
    columns = {name: place for place, name in enumerate(schedules)}
    bottlenecks: dict[str, int] = {}
    for key, rivals in questions_of(rows, names).items():
        point = tuple(of[value] for of, value in zip(places, key, strict=True))
        timed, _, regrets = with_regrets(rivals)
        costs = [costs_of(row) for row in timed]
        preferred = sorted(range(len(timed)), key=lambda number: by_costs(costs[number]))
        for number, row in enumerate(timed):
            cell = (*point, columns[row["schedule"]])
            time[cell], order[cell] = math.log(row["time_s"]), preferred.index(number)
            regret[cell] = math.log1p(regrets[number])
            text = str(row["bottleneck"] or "")
            bottleneck[cell] = bottlenecks.setdefault(text, min(len(bottlenecks), 254))
    error = interpolation_error(time, axes, None if left_out is None else positions(axes, schedules, left_out))
    if error is None or error["median"] > MOST_ERROR:
        error, axes = None, [axis | {"between": False} for axis in axes]
    return {
        "axes": axes,
        "schedules": schedules,
        "colors": [colors[name] for name in schedules],
        "time": _packed(time),
        "regret": _packed(regret),
        "order": _base64(order),
        "bottleneck": _base64(bottleneck),
        "bottlenecks": list(bottlenecks),
        "command": _held_flags(rows, names),
        "tie": TIE,
        "decided": DECIDED,
        "error": error,
    }


def map_script(grid: Grid, element: str = "live-map") -> str:
    """JavaScript that draws a grid into an element of the page; it needs ``live_map.js`` before it."""
    document = json.dumps(grid, separators=(",", ":"), allow_nan=False)
    return f'liveMap(document.getElementById("{element}"), {document});\n'


def map_library() -> str:
    """The text of ``live_map.js``."""
    return files("tasp_lab.study").joinpath("live_map.js").read_text("utf-8")


def interpolation_error(
    log_times: FloatArray, axes: Sequence[Axis], left_out: tuple[FloatArray, FloatArray] | None = None
) -> dict[str, Any] | None:
    """How far predicted times are from those that are interpolated between the others.

    Parameters
    ----------
    log_times : logarithms over the axes and schedules.
    left_out : positions of points between those of the grid, an array (points, axes), and the logarithms of their
        times, (points, schedules); by default every second value of each axis is left out, which doubles distances.

    ``median`` and ``ninth`` (of ten) are shares of the time, ``times`` is how many were left out, ``where`` says which.
    None without any.
    """
    from scipy.interpolate import RegularGridInterpolator  # here, since it takes longer to import than a report to make

    marks = [np.log(axis["values"]) if axis["between"] else np.arange(len(axis["values"])) for axis in axes]
    where, parts = "between the points of the grid", tuple(slice(None) for _ in axes)
    if left_out is None:
        where = "left out at every second value of the axes"
        parts = tuple(slice(None, None, 2 if axis["between"] else 1) for axis in axes)
        every = np.array([mark.ravel() for mark in np.meshgrid(*marks, indexing="ij")]).T
        left_out = every, log_times.reshape(len(every), -1)
    coarse = [mark[part] for mark, part in zip(marks, parts, strict=True)]
    # an axis of one value cannot be interpolated, and need not be
    several = [place for place, mark in enumerate(coarse) if len(mark) > 1]
    within = log_times[parts].reshape(*(len(coarse[place]) for place in several), log_times.shape[-1])
    points, actual = left_out
    is_known = np.all([np.isin(points[:, place], mark) for place, mark in enumerate(coarse)], axis=0)
    if is_known.all() or not several:
        return None
    guess = RegularGridInterpolator([coarse[place] for place in several], within, bounds_error=False)
    errors = np.abs(np.expm1(guess(points[~is_known][:, several]) - actual[~is_known]))
    errors = errors[np.isfinite(errors)]
    if not len(errors):
        return None
    ninth = float(np.quantile(errors, 0.9))
    return {"median": float(np.median(errors)), "ninth": ninth, "times": len(errors), "where": where}


def positions(axes: Sequence[Axis], schedules: Sequence[str], rows: pd.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Rows of points between those of a grid as `interpolation_error` takes them."""
    names = [axis["name"] for axis in axes]
    found = questions_of(with_factors(rows, is_grid=False), names)
    points = [
        [
            math.log(value) if axis["between"] else axis["values"].index(value)
            for axis, value in zip(axes, key, strict=True)
        ]
        for key in found
    ]
    times = [{row["schedule"]: row["time_s"] for row in rivals} for rivals in found.values()]
    return np.array(points), np.log([[each.get(name) or math.nan for name in schedules] for each in times])


# ------------------------------------------------------------------------------------------------------- axes


def with_factors(rows: pd.DataFrame, is_grid: bool = True) -> pd.DataFrame:
    """The rows with a column of factors for each override instead of the variants, if these are nothing else.

    Those of a grid must be all combinations.

    >>> import pandas as pd
    >>> overrides = ["", "nic.bandwidth=x2", "compute.rate=x0.5", "nic.bandwidth=x2, compute.rate=x0.5"]
    >>> rows = pd.DataFrame({"variant": list("abcd"), "overrides": overrides})
    >>> with_factors(rows)["nic.bandwidth"].tolist(), with_factors(rows[:3]) is not rows
    ([1.0, 2.0, 1.0, 2.0], True)
    """
    texts = [str(text or "") for text in rows["overrides"]]
    factors = {text: _factors(text) for text in dict.fromkeys(texts)}
    names = list(dict.fromkeys(name for found in factors.values() for name in found or ()))
    if not names or None in factors.values():
        return rows
    values = {name: {text: (found or {}).get(name, 1.0) for text, found in factors.items()} for name in names}
    combinations = set(zip(*(of.values() for of in values.values()), strict=True))
    full = math.prod(len(set(of.values())) for of in values.values())
    if is_grid and not full == len(combinations) == len(factors):
        return rows
    wide = rows.drop(columns=["variant", "overrides"])
    return wide.assign(**{name: [of[text] for text in texts] for name, of in values.items()})


def _factors(overrides: str) -> dict[str, float] | None:
    """The factors of overrides; None where these are something else, too."""
    found: dict[str, float] = {}
    for part in filter(None, overrides.split(", ")):
        if (factor := factor_of(part)) is None:
            return None
        found[factor[0]] = found.get(factor[0], 1.0) * float(factor[1])
    return found


def _axis(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    """An axis of the grid; lengths and factors of three values or more are interpolated."""
    values = list(dict.fromkeys(map(plain, rows[name])))
    numbers = all(is_number(value) for value in values)
    values = sorted(values) if numbers else values
    is_factor = name not in FLAGS and "." in name
    between = numbers and len(values) > 2 and (is_factor or name == "seq")
    if is_factor:
        texts, arguments = [f"x{factor_text(value)}" for value in values], [f"--set {name}=x"]
    elif name == "variant":
        texts = [str(value) for value in values]
        of_variant = dict(zip(rows["variant"], rows["overrides"], strict=True))
        arguments = [
            " ".join(f"--set {part}" for part in (of_variant[value] or "").split(", ") if part) for value in values
        ]
    else:
        texts = [text_of(name, value) for value in values]
        arguments = [f"{FLAGS[name]} ".lstrip()] if name in FLAGS else []
    return {"name": name, "title": title_of(name), "values": values, "texts": texts, "arguments": arguments,
            "between": between}  # fmt: skip


def _held_flags(rows: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The command `tasp-lab compare` with what is the same at all points; the parts of axes are put in by the page."""
    held = held_constant(rows)
    has_model = "model" in held or "model" in axes
    parts = ["tasp-lab compare"]
    for name, flag in FLAGS.items():
        is_default = held.get(name) == DEFAULTS.get(name, "auto" if name == "library" else None)
        if name in held and not is_default and not (has_model and name in OF_MODEL):
            parts.append(f"{flag} {text_of(name, held[name])}".strip())
    for part in filter(None, str(held.get("overrides", "")).split(", ")):
        parts.append(f"--set {part}")
    return parts


# ----------------------------------------------------------------------------------------------------- arrays


def _packed(logs: FloatArray) -> Mapping[str, Any]:
    """Logarithms as 16 bits each between the least and the largest one."""
    known = logs[np.isfinite(logs)]
    # 16 bits over a factor of 1,000 in time are steps of 0.01 %: far below any error, at a quarter of the size
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    step = (high - low) / (NONE - 1) or 1.0
    codes = np.where(np.isfinite(logs), np.rint((logs - low) / step), NONE).astype("<u2")
    return {"low": low, "step": step, "data": _base64(codes)}


def _base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
