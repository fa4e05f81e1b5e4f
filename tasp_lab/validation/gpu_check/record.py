"""The record of a check: one JSON file and one page of text, written after every step."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.progress import on_one_line
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table, to_text
from tasp_lab.core.version import VERSION

Verdict = Literal["passed", "failed", "skipped", "interrupted"]
RecordVerdict = Literal["passed", "failed", "interrupted", "running"]

JSON_NAME, TEXT_NAME = "gpu-check.json", "gpu-check.txt"

Numbers = Mapping[str, object]
"""What a step has measured, as plain JSON: values, lists of values, objects, or lists of objects (a table)."""


@dataclass(frozen=True)
class StepResult:
    """What came of one step.

    Parameters
    ----------
    number, name, proves : see `tasp_lab.validation.gpu_check.steps.Step`.
    verdict : ``skipped`` also where numbers are measured but limits do not apply.
    numbers : what was measured.
    seconds : how long the step took.
    message : why it failed, was skipped or interrupted; else empty.
    if_it_fails : what a failure means, and what to do.
    """

    number: int
    name: str
    proves: str
    verdict: Verdict
    numbers: Numbers
    seconds: float
    message: str
    if_it_fails: str

    def to_dict(self) -> dict[str, object]:
        return {**vars(self), "numbers": _plain(self.numbers)}

    def row(self) -> tuple[str, ...]:
        """The row of the table of all steps."""
        told = on_one_line(self.message or self.proves)
        return str(self.number), self.name, self.verdict, f"{self.seconds:.1f} s", told


@dataclass(frozen=True, repr=False)
class Record(Report):
    """All steps of a check so far.

    `is_reporter` is False on the ranks that leave the output to rank 0; `ended_by` is why it ended between two steps.
    """

    machine: str
    world_size: int
    backend: str
    quick: bool
    steps: tuple[StepResult, ...] = ()
    verdict: RecordVerdict = "running"
    is_reporter: bool = True
    ended_by: str = ""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def error(self) -> str | None:
        """Why the check did not pass, on one line."""
        last = next((step for step in self.steps if step.verdict in ("failed", "interrupted")), None)
        if last is not None:
            return f"gpu-check: step {last.number}, {last.name}, {last.verdict}: {last.message}"
        return f"gpu-check: {self.verdict} between steps: {self.ended_by}" if self.ended_by else None

    def with_step(self, step: StepResult) -> Record:
        """The record with one more step; one that did not pass ends it."""
        ended = step.verdict in ("failed", "interrupted")
        return replace(self, steps=(*self.steps, step), verdict=step.verdict if ended else self.verdict)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {
            "record": "gpu-check",
            "version": VERSION,
            "date": self.date,
            "machine": self.machine,
            "world_size": self.world_size,
            "backend": self.backend,
            "quick": self.quick,
            "verdict": self.verdict,
            "steps": [step.to_dict() for step in self.steps],
        }
        return found if self.error is None else found | {"error": self.error}

    def records(self) -> list[dict[str, object]]:
        """A row per step, without its numbers."""
        return [
            {name: value for name, value in step.to_dict().items() if name != "numbers"} for step in self.steps
        ]  # fmt: skip

    def parts(self) -> list[Part]:
        how = "quick" if self.quick else "all"
        title = f"gpu-check {self.machine}, {self.world_size} ranks, {self.backend}, {how}, {self.date}: {self.verdict}"
        rows = [step.row() for step in self.steps]
        parts: list[Part] = [Table(title, ("", "step", "verdict", "time", "proves, or why not"), rows, (1, 2, 4))]
        for step in self.steps:
            parts += _step_parts(step)
        return parts

    def save(self, folder: Path) -> None:
        """Write both files. Raises `OutputError`."""
        document = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        write_whole(folder / JSON_NAME, f"{document}\n".encode())
        write_whole(folder / TEXT_NAME, f"{to_text(self.parts())}\n".encode())


def check_folder(folder: Path) -> None:
    """Make the folder of the record, unless it is there. Raises `OutputError` if the record cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    for name in (JSON_NAME, TEXT_NAME):
        check_writable(folder / name)


def _plain(value: object) -> object:
    """A value as JSON; numbers that are not finite become texts, as JSON has none.

    >>> _plain({"a": [math.inf, (1, math.nan)], "b": None, "c": Path("x")})
    {'a': ['inf', [1, 'nan']], 'b': None, 'c': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _step_parts(step: StepResult) -> list[Part]:
    """The numbers of a step, and what to do if it failed."""
    parts: list[Part] = ["", f"{step.number} {step.name}: {step.verdict}", f"   proves: {step.proves}"]
    if step.message:
        parts.append(f"   {step.message}")
    if step.verdict == "failed":
        parts.append(f"   what it means: {step.if_it_fails}")
    for name, value in step.numbers.items():
        parts += _number_parts(name, value)
    return parts


def _number_parts(name: str, value: object) -> list[Part]:
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        columns = list(dict.fromkeys(key for each in value for key in each))
        rows = [[_text(each.get(key, "")) for key in columns] for each in value]
        return [Table(name.replace("_", " "), columns, rows, _texts(columns, value))]
    if isinstance(value, Mapping):
        return [f"   {name}:", *(f"      {key}: {_text(each)}" for key, each in value.items())]
    if isinstance(value, str) and "\n" in value:
        return [f"   {name}:", *(f"      {line}" for line in value.splitlines())]
    return [f"   {name}: {_text(value)}"]


def _texts(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> list[int]:
    """The positions of columns that are no numbers."""
    return [
        position
        for position, column in enumerate(columns)
        if not all(isinstance(row.get(column, 0), (int, float)) for row in rows)
    ]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(each)}" for key, each in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)
