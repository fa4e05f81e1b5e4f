"""The record of ``tasp-lab gpu-check``: its steps, as JSON and as a page of text, written after every step."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasp_lab.core.errors import OutputError, TaspLabError, first_line
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.progress import on_one_line
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Formats, Part, Table, to_text
from tasp_lab.core.version import VERSION

JSON_NAME, TEXT_NAME = "gpu-check.json", "gpu-check.txt"

Verdict = Literal["running", "passed", "failed", "skipped", "interrupted"]


@dataclass
class Step:
    """A step: `message` is why it failed, was skipped or interrupted, else empty; `numbers` are rank 0's, as JSON.

    A step is ``skipped`` also where numbers are measured but limits do not apply.
    """

    number: int
    name: str
    verdict: Verdict = "running"
    numbers: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    message: str = ""
    if_it_fails: str = ""


@dataclass(repr=False)
class Record(Report):
    """All steps of a check so far.

    `is_reporter` is False on the ranks that leave the output to rank 0; `ended_by` is why it ended between two steps.
    """

    machine: str
    world_size: int
    backend: str
    quick: bool
    steps: list[Step] = field(default_factory=list)
    verdict: Verdict = "running"
    is_reporter: bool = True
    ended_by: str = ""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def error(self) -> str | None:
        """Why the check did not pass, on one line."""
        first = next((step for step in self.steps if step.verdict in ("failed", "interrupted")), None)
        if first is not None:
            return f"gpu-check: step {first.number}, {first.name}, {first.verdict}: {first.message}"
        return f"gpu-check: {self.verdict} between steps: {self.ended_by}" if self.ended_by else None

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {"record": "gpu-check", "version": VERSION, **_plain(asdict(self))}
        del found["is_reporter"], found["ended_by"]
        return found if self.error is None else found | {"error": self.error}

    def records(self) -> list[dict[str, object]]:
        """A row per step, without its numbers."""
        return [{name: value for name, value in vars(step).items() if name != "numbers"} for step in self.steps]

    def parts(self) -> list[Part]:
        how = "quick" if self.quick else "all"
        title = f"gpu-check {self.machine}, {self.world_size} ranks, {self.backend}, {how}, {self.date}: {self.verdict}"
        columns: Formats = {
            "": "{number}", "step": "{name}", "verdict": "{verdict}", "time": "{seconds:.1f} s",
            "why": lambda row: on_one_line(row["message"]),
        }  # fmt: skip
        parts: list[Part] = [*Table.of(title, self.records(), columns, (1, 2, 4))] or [title]
        for step in self.steps:
            parts += ["", f"{step.number} {step.name}: {step.verdict}"]
            parts += [f"   {step.message}"] if step.message else []
            parts += [f"   what it means: {step.if_it_fails}"] if step.verdict == "failed" else []
            for name, value in step.numbers.items():
                parts += _number_parts(name, value)
        return parts

    def save(self, folder: Path) -> None:
        """Write both files. Raises `OutputError`."""
        document = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        write_whole(folder / JSON_NAME, f"{document}\n".encode())
        write_whole(folder / TEXT_NAME, f"{to_text(self.parts())}\n".encode())


def _plain(value: object) -> Any:
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


def _number_parts(name: str, value: object) -> list[Part]:
    """What a step has measured: a table of objects, else lines."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        columns = list(dict.fromkeys(key for each in value for key in each))
        rows = [[_text(each.get(key, "")) for key in columns] for each in value]
        texts = [
            at for at, key in enumerate(columns) if not all(isinstance(row.get(key, 0), (int, float)) for row in value)
        ]
        return [Table(name.replace("_", " "), columns, rows, texts)]
    if isinstance(value, Mapping):
        return [f"   {name}:", *(f"      {key}: {_text(each)}" for key, each in value.items())]
    if isinstance(value, str) and "\n" in value:
        return [f"   {name}:", *(f"      {line}" for line in value.splitlines())]
    return [f"   {name}: {_text(value)}"]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(each)}" for key, each in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


def check_folder(folder: Path) -> None:
    """Make the folder of the record, unless it is there. Raises `OutputError` if the record cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    for name in (JSON_NAME, TEXT_NAME):
        check_writable(folder / name)


def in_one_line(error: BaseException) -> str:
    """The error on one line, with the type of errors that are not ours."""
    if isinstance(error, AssertionError):  # pytest adds lines that explain it
        return first_line(error)
    own = isinstance(error, TaspLabError)
    return on_one_line(str(error) if own else f"{type(error).__name__}: {first_line(error)}")
