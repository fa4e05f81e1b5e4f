"""Tables from the output of nccl-tests and rccl-tests.

All versions print lines about the ranks, a line with the names of the columns, and a row per size. These are recognised
after any prefix, such as that of a launcher, a time stamp or a queue; the prefix distinguishes runs with interleaved
output. Other lines are ignored. With NCCL_DEBUG, messages of NCCL may stand before or behind a row or a comment on one
line: the output of several processes and buffers is joined without regard to lines.

A row that is not whole, such as the last one of an interrupted log or one that a message of NCCL cuts, is skipped with
a warning. A row with wrong results or a time rounded to 0 is an error: such a run is no measurement of the machine.

Formats: NVIDIA/nccl-tests, src/util.cu and src/common.cu, from 2.0 (column ``error``) to 2.18 (columns per iteration);
ROCm/rccl-tests, src/common.cu.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tasp_lab.core.errors import TableError
from tasp_lab.measure.readers.file_position import FilePosition, quoted
from tasp_lab.measure.readers.table import COLLECTIVES, MeasuredTable, Row
from tasp_lab.schedules.collectives.kinds import NcclTestsName

_TIME = r"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_TIME_STAMP = re.compile(rf"\[(?:{_TIME})?\]|\((?:{_TIME})?\)|{_TIME}")
_PROGRAM = re.compile(
    r"\b(all_gather|all_reduce|alltoallv?|sendrecv|reduce_scatter|broadcast|reduce|gather|scatter|hypercube)_perf"
)
_VERSION = re.compile(r"\bnccl-library=(\d{4,5})\b")
_PREAMBLE = re.compile(r"(.*?)#\s*(?:nccl-tests version|Collective test starting|nThread|Using devices)\b(.*)")
_RANK = re.compile(
    r"(.*?)#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[.*?\]\s*(.*)"
)
_COLUMNS = re.compile(r"(.*?)#\s+(size\s+count\s+type\b.*)")
_TYPE = re.compile(r"\s(u?int(?:8|32|64)?|char|half|float|double|bfloat16|fp8\w*|f8\w*)(?:\s|$)")
_ROW = re.compile(r"(.*?)(?<![\w.,+-])(-?\d[\w.,]*(?:\s[KMGT]i?B)?)\s+(\S+)")
_END = re.compile(r"(.*?)#\s*Avg bus bandwidth\b.*")
_PROFILE = re.compile(r"^#\s*profile\s*:\s*(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_STATED = re.compile(r"^#\s*collective\s*:\s*(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_MESSAGE = re.compile(
    rf"(?:\[{_TIME}\] *)?[A-Za-z][\w.-]*:\d+:\d+ +(?:\[\d+\] +)?(?:\S+:\d+ +)?(?:[NR]CCL +)?"
    r"(?:INFO|WARN|ERROR|ABORT|TRACE|CALL|VERSION)\b"
)
"""How a message of NCCL begins: ``node1:123:456 [0] NCCL INFO``, in warnings with the place in its code before NCCL
(NVIDIA/nccl, src/debug.cc), and maybe a time stamp before all. A host's name begins with a letter here, since a digit
may be the end of a row before it.
"""

_PART_OF_ROW = re.compile(r"\d+( \d+( [a-z]\w*)?)?|(-?[\d.]+ |N/A ){3,}[\d.]+")
"""The beginning of a row, or the rest of one, with single spaces between words."""

_UNNAMED = (
    "the log does not name its collective: expected a file name such as all_gather.log, "
    "or a line # collective: all_gather in it"
)
_LAUNCHER_WORDS = 3
"""No launcher's prefix has more words; Ray's ``(name pid=1, ip=10.0.0.1)`` has three (assumption)."""
_OUT_OF_BOUNDS = re.compile(r"(.*?)#\s*Out of bounds values\s*:\s*([1-9]\d*)\b.*")

_DEFAULT_COLUMNS = ["size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2]
_BYTES = {"half": 2, "bfloat16": 2, "float": 4, "int": 4, "int32": 4, "uint32": 4, "double": 8, "int64": 8, "uint64": 8}
"""Bytes per element; all other types have one byte."""

_COUNTED_PER_RANK: tuple[NcclTestsName, ...] = ("all_gather", "reduce_scatter", "alltoall")
"""Collectives whose column ``count`` is per rank, so that size / count is the number of ranks."""


class _Rank(NamedTuple):
    group: str
    host: str
    gpu: str


@dataclass(frozen=True)
class _Line:
    """A printed row; the words after the type follow the order of the columns, unless some are missing.

    `is_shared` is whether a message of NCCL is on the same line, and may have taken some of it.
    """

    place: FilePosition
    size: str
    count: str
    element: str
    words: tuple[str, ...]
    is_shared: bool


def _version_of(code: int) -> str:
    """The version in a code of NCCL: major, minor and patch with four digits before 2.9, with five since.

    NVIDIA/nccl, src/nccl.h.in, NCCL_VERSION.

    >>> _version_of(22809), _version_of(2708)
    ('2.28.9', '2.7.8')
    """
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _line_of(line: str, place: FilePosition, is_shared: bool) -> tuple[str, _Line] | None:
    """A row and its prefix, recognised by a size and a count right before the name of a type."""
    for element in _TYPE.finditer(line):
        if start := _ROW.fullmatch(line[: element.start()].rstrip()):
            words = tuple(line[element.end() :].split())
            return start[1], _Line(place, start[2], start[3], element[1], words, is_shared)
    return None


@dataclass
class _Run:
    """The output of one run so far, and the prefix of its lines."""

    prefix: str
    first_line: int
    program: str | None
    parameters: str = ""
    nccl: str = ""
    ranks: dict[int, _Rank] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    are_columns_shared: bool = False
    lines: list[_Line] = field(default_factory=list)
    parts: list[FilePosition] = field(default_factory=list)
    out_of_bounds: FilePosition | None = None
    is_complete: bool = False


def parse_nccl_tests(text: str, name: str, *, in_place: bool | None = False) -> list[MeasuredTable]:
    """The tables in the text of a log named `name`, one per run; none if there is no run in it.

    The times are those of the out-of-place columns, or of the `in_place` ones; with None the lesser of both, since the
    first use of something may be in either. The collective is taken from the
    preamble of the run, else from the command line before it, a line ``# collective: NAME``, which no tool prints, the
    name of the file or of its folders, or the columns if they allow only one.
    Headers of a table: ``profile`` if there is a line ``# profile: NAME``, which no tool prints, ``gpu``, ``nodes``,
    ``ranks_per_node`` if equal on all nodes, ``groups`` if the ranks were split, ``parameters``, ``columns``, ``nccl``:
    its version, which newer nccl-tests print.

    >>> [table] = parse_nccl_tests('''
    ... # Collective test starting: all_gather_perf
    ... #  Rank  0 Group  0 Pid  41 on node1 device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
    ... #  Rank  1 Group  0 Pid  41 on node1 device  1 [0000:1f:00] NVIDIA H100 80GB HBM3
    ... #   size   count   type   redop   root    time   algbw   busbw  #wrong    time   algbw   busbw  #wrong
    ...     1024     128  float    none     -1    8.00    0.13    0.06       0    7.50    0.14    0.07       0
    ... ''', "log")
    >>> table.collective, table.ranks, table.headers["gpu"], table.rows
    ('all_gather', 2, 'NVIDIA H100 80GB HBM3', (Row(size_bytes=1024, time_s=8e-06),))

    Raises `TableError` for wrong results, for sizes and times that are not positive numbers, and for a size with a unit
    that contradicts the number of elements. Rows of 0 bytes, which older versions print, are skipped.
    """
    runs = [run for run in _runs(text, name) if run.lines or run.columns]
    hint, named = _collective_of_text(text, name), _PROFILE.search(text)
    titles = [f"{name}, run {number}" for number in range(1, len(runs) + 1)] if len(runs) > 1 else [name]
    profile = named[1] if named else None
    return [_table(run, in_place, title, hint, profile) for title, run in zip(titles, runs, strict=False)]


def _table(
    run: _Run, in_place: bool | None, title: str, hint: NcclTestsName | None, profile: str | None
) -> MeasuredTable:
    if in_place is not None:
        return _Reader(run, in_place).table(title, hint, profile)
    one, other = (_Reader(run, each).table(title, hint, profile) for each in (False, True))
    times_s: dict[int, float] = {}
    for row in (*one.rows, *other.rows):
        times_s[row.size_bytes] = min(row.time_s, times_s.get(row.size_bytes, row.time_s))
    return replace(one if one.rows else other, rows=tuple(Row(*each) for each in sorted(times_s.items())))


def _runs(text: str, name: str) -> list[_Run]:
    """The runs in the order of their first lines."""
    runs: list[_Run] = []
    open_runs: dict[str, _Run] = {}
    program, program_line = "", 0
    cut_line, cut = 0, ""  # the last line with a message, which may cut the line after it

    def prefix_of(before: str) -> str:
        """The launcher's prefix in what stands before a row or a comment, which may have other output behind it."""
        message = _MESSAGE.search(before)
        prefix, whole = _without_time(before[: message.start()] if message else before), _without_time(before)
        # e.g. "0: node1:7:8 [0] NCCL INFO ... 0: " before a row: an open run's prefix stands around or behind the rest
        if message or (prefix not in open_runs and len(prefix.split()) > _LAUNCHER_WORDS):
            known = [each for each in open_runs if _is_around(each, whole)]
            prefix = max(known, key=lambda each: (bool(open_runs[each].columns), len(each)), default=prefix)
        # a message cut the line before inside its prefix, so this one begins with the rest of the prefix
        if prefix not in open_runs and number == cut_line + 1:
            cuts = [each for each in open_runs if each.endswith(prefix) and cut.startswith(each.removesuffix(prefix))]
            prefix = max(cuts, key=len, default=prefix)
        return prefix

    def run_of(before: str, begins: bool = False) -> _Run:
        prefix = prefix_of(before)
        run = open_runs.get(prefix)
        if run is None or (begins and (run.columns or run.lines)):
            # a program that a command line names is that of the next run only
            is_new = run is None or program_line > run.first_line
            run = open_runs[prefix] = _Run(prefix, number, program if program and is_new else None)
            runs.append(run)
        return run

    for number, line, is_shared in _lines(text):
        if is_shared:
            cut_line, cut = number, _without_time(line)
        place, named = FilePosition(name, number), _PROGRAM.search(line) if "_perf" in line else None
        if (fields := _line_of(line, place, is_shared)) and "#" not in _MESSAGE.split(fields[0])[0]:
            run_of(fields[0]).lines.append(fields[1])
        elif match := _PREAMBLE.fullmatch(line):
            run = run_of(match[1], begins=True)
            if "nThread" in line:
                run.parameters = " ".join(line[line.index("nThread") :].split())
            if version := _VERSION.search(line):
                run.nccl = _version_of(int(version[1]))
            run.ranks = {}  # a preamble begins the list again: ranks before it are of a run without rows
            if named:
                run.program = named[1]
        elif match := _RANK.fullmatch(line):
            run_of(match[1], begins=True).ranks[int(match[2])] = _Rank(match[3] or "0", match[4], match[5].strip())
        elif match := _COLUMNS.fullmatch(line):
            is_cut = is_shared and not re.search("wrong|error", re.split(r"\btime\b", match[2])[-1])
            columns, run = match[2].replace("# wrong", "#wrong").split(), run_of(match[1], begins=True)
            run.columns, run.are_columns_shared = _DEFAULT_COLUMNS if is_cut else columns, is_shared
        elif match := _OUT_OF_BOUNDS.fullmatch(line):
            run_of(match[1]).out_of_bounds = place
        elif match := _END.fullmatch(line):
            run_of(match[1]).is_complete = True
        elif named and "concluded" not in line:
            program, program_line = named[1], number
        else:
            words, may_end_in_row = _without_time(line), is_shared and _TYPE.search(line)
            for prefix, run in open_runs.items():
                is_part = may_end_in_row or _PART_OF_ROW.fullmatch(words.removeprefix(prefix).strip())
                if is_part and run.columns and not run.is_complete and words.startswith(prefix):
                    run.parts.append(place)
    _share_ranks(runs)
    return runs


def _is_around(prefix: str, text: str) -> bool:
    """Whether a prefix is before other text, behind it, or cut by it.

    >>> [_is_around("[1,0]:", each) for each in ("[1,0]: INFO", "INFO [1,0]:", "[1,INFO0]:", "[1,1]: INFO")]
    [True, True, True, False]
    """
    return any(text.startswith(prefix[:at]) and text.endswith(prefix[at:]) for at in range(len(prefix) + 1))


def _without_time(before: str) -> str:
    """Text without time stamps, with single spaces."""
    return " ".join(_TIME_STAMP.sub("", before).split())


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """The lines with their numbers, and whether each shares its line with a message of NCCL.

    A message begins a line of its own, with the launcher's prefix.

    >>> list(_lines("0:  8node1:7:8 [0] NCCL INFO comm"))
    [(1, '0:  8', True), (1, '0:node1:7:8 [0] NCCL INFO comm', True)]
    """
    for number, line in enumerate(text.splitlines(), 1):
        starts = [message.start() for message in _MESSAGE.finditer(line)]
        if not starts:
            yield number, line, False
            continue
        head = line[: starts[0]]
        launcher = re.split(r"#|\s{2,}", head)[0]
        yield number, head, True
        for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
            yield number, launcher + line[start:end], True


def _share_ranks(runs: Sequence[_Run]) -> None:
    """Add the ranks that other processes printed with other prefixes to the only table of a log."""
    tables = [run for run in runs if run.columns or run.lines]
    if len(tables) == 1:
        for run in runs:
            if run.prefix != tables[0].prefix:
                tables[0].ranks = run.ranks | tables[0].ranks


def _collective_of_text(text: str, name: str) -> NcclTestsName | None:
    """The collective that a line ``# collective:`` states, else that in the name of the file, else of its folders.

    >>> _collective_of_text("", "all_gather/run-1.log"), _collective_of_text("", "alltoallv.log")
    ('all_gather', None)

    Raises `TableError` for another collective in such a line.
    """
    if stated := _STATED.search(text):
        if stated[1] not in COLLECTIVES:
            place = FilePosition(name, text.count("\n", 0, stated.start()) + 1)
            raise place.error(f"collective {quoted(stated[1])}", f"one of {', '.join(COLLECTIVES)}")
        return next(collective for collective in COLLECTIVES if collective == stated[1])
    patterns = {each: "[^a-z]*".join(each.replace("_", "")) + "(?!v)" for each in COLLECTIVES}
    for part in reversed(Path(name).parts):
        if found := [collective for collective, pattern in patterns.items() if re.search(pattern, part.lower())]:
            return found[0] if len(found) == 1 else None
    return None


class _Reader:
    """Builds the table of one run."""

    def __init__(self, run: _Run, in_place: bool) -> None:
        self.run = run
        columns = run.columns or _DEFAULT_COLUMNS
        if run.are_columns_shared and all(len(line.words) > len(columns) - 3 for line in run.lines):
            columns = _DEFAULT_COLUMNS  # a message took the last ones
        names = [column for column in columns[3:] if column != "timestamp"]
        starts = [index for index, column in enumerate(names) if column in ("time", "cputime")]
        first = starts[0] if starts else len(names)
        self.keys, self.measures = names[:first], names[first:]
        self.extra_words = 2 if "timestamp" in columns else 0
        self.is_cpu_time = "cputime" in names
        self.start = starts[in_place] - first if in_place < len(starts) else None
        self.columns = "in-place" if in_place else "out-of-place"
        self.ratio: int | None = None
        self.operations: set[tuple[str, ...]] = set()

    def table(self, name: str, hint: NcclTestsName | None, profile: str | None) -> MeasuredTable:
        """The table, with the reasons why it cannot be used, if any."""
        rows, warnings = self._rows()
        collective, unnamed = self._collective(hint)
        ranks, missing = self._ranks(collective)
        reasons = [unnamed, missing]
        reasons += ["its times are those of the CPU (option -C)"] if self.is_cpu_time else []
        reasons += [f"no {self.columns} columns"] if self.start is None else [] if rows else ["no rows"]
        headers = {"profile": profile or "", "columns": self.columns, "parameters": self.run.parameters,
                   "nccl": self.run.nccl}  # fmt: skip
        if listed := self.run.ranks.values():
            hosts, groups = Counter(rank.host for rank in listed), {rank.group for rank in listed}
            headers |= {"gpu": " and ".join(dict.fromkeys(rank.gpu for rank in listed)), "nodes": str(len(hosts))}
            headers["ranks_per_node"] = str(len(listed) // len(hosts)) if len(set(hosts.values())) == 1 else ""
            headers["groups"] = str(len(groups)) if len(groups) > 1 else ""
        headers = {key: text for key, text in headers.items() if text or key == "gpu"}
        reason = ", ".join(filter(None, reasons))
        return MeasuredTable(name, headers, collective, ranks, rows, reason, tuple(warnings))

    def _rows(self) -> tuple[tuple[Row, ...], list[str]]:
        rows, empty = [], 0
        warnings = [f"{place}: a part of a row skipped, other output cuts it" for place in self.run.parts]
        for line in self.run.lines:
            try:
                words, row, ratio = self._measured_words(line), None, None
                if self.start is not None and words is not None and line.size != "0":
                    row = Row(line.place.size_bytes(line.size), line.place.time_s(words[self.start]))
                    ratio = self._ratio(line, row.size_bytes)
            except TableError:
                if not line.is_shared:
                    raise
                words = row = None
            if line.size == "0":
                empty += 1
            elif words is None or re.match(r"0\d", line.size) or re.match(r"0\d", line.count):  # the end of a number
                warnings.append(f"{line.place}: truncated row of size {line.size} skipped")
            elif row is not None:
                self._check_results(line, row.size_bytes, words)
                rows.append((line, row, ratio))
        if empty:
            warnings.append(f"{self.run.lines[0].place.file}: {empty} rows of 0 bytes skipped")
        if rows and not self.run.is_complete:
            warnings.append(f"{self.run.lines[-1].place}: no end of the run after this line, the log may be truncated")
        ratios = Counter(ratio for *_, ratio in rows if ratio)
        self.ratio = max(ratios, key=lambda each: (ratios[each], each in (1, len(self.run.ranks))), default=None)
        # other output took digits of the size or the count of a row with another ratio
        warnings += [
            f"{line.place}: row skipped, its size {line.size} does not fit {line.count} elements"
            for line, _, ratio in rows
            if ratio not in (None, self.ratio)
        ]
        return tuple(row for _, row, ratio in rows if ratio in (None, self.ratio)), warnings

    def _measured_words(self, line: _Line) -> tuple[str, ...] | None:
        """The words of the measured columns, or None if some are missing. Operation and root may be blank."""
        words, has_root = line.words, "root" in self.keys
        if words and words[0].isalpha() and words[0].islower():
            leading = 1 + has_root
        else:
            leading = 1 if has_root and len(words) == len(self.measures) + 1 else 0
        measured = words[leading:] if self.measures else ()
        if len(measured) < len(self.measures) or "NCCL" in words:
            return None
        if len(measured) not in (len(self.measures), len(self.measures) + self.extra_words):
            raise line.place.error(f"{len(measured)} numbers after the type", f"{len(self.measures)}")
        self.operations.add(words[:leading])
        return measured

    def _ratio(self, line: _Line, size_bytes: int) -> int | None:
        """The size over the bytes of its elements; 0 if they do not fit, None without elements.

        A manual edit that confuses 1000 and 1024 is an error.
        """
        elements = 0 if line.count == "0" else line.place.count(line.count, "count")
        element_bytes = elements * _BYTES.get(line.element, 1)
        if not element_bytes:
            return None
        if size_bytes % element_bytes and not line.size.isdecimal():
            raise line.place.error(
                f"size {quoted(line.size)} is {size_bytes} bytes, but {elements} elements are {element_bytes}",
                "a multiple (KiB counts in 1024, KB in 1000)",
            )
        return 0 if size_bytes % element_bytes else size_bytes // element_bytes

    def _check_results(self, line: _Line, size_bytes: int, words: Sequence[str]) -> None:
        """Raise for wrong results. Older versions print a deviation as ``error``; their footer counts the errors."""
        assert self.start is not None, "a row has a time"
        words = words[self.start :]
        column = self.measures[self.start + 3] if len(self.measures) > self.start + 3 else ""
        if column == "#wrong" and not "N/A".startswith(words[3]) and line.place.number(words[3], "#wrong") != 0:
            raise line.place.error(f"{words[3]} wrong results of {size_bytes} bytes", "none")
        if column == "error" and self.run.out_of_bounds is not None:
            raise self.run.out_of_bounds.error("values out of bounds", "none")

    def _collective(self, hint: NcclTestsName | None) -> tuple[NcclTestsName | None, str]:
        """The collective, or why it is not known: of the program, else of the columns, which the hint may name."""
        if (program := self.run.program) is not None:
            known = next((collective for collective in COLLECTIVES if collective == program), None)
            return known, "" if known else f"the collective {program!r} is none of {', '.join(COLLECTIVES)}"
        # operation, root and the size per rank leave one collective; all_gather and alltoall are ambiguous
        by_columns: NcclTestsName | None = None
        operation = next(iter(self.operations)) if len(self.operations) == 1 else ()
        if operation and operation[1:] in ((), ("-1",)) and self.ratio is not None:
            if operation[0] != "none":
                by_columns = "all_reduce" if self.ratio == 1 else "reduce_scatter"
            elif self.ratio == 1 and operation[1:]:
                by_columns = "sendrecv"
        if hint and by_columns and hint != by_columns:
            return None, f"it is called {hint}, but its columns are those of {by_columns}"
        return hint or by_columns, "" if hint or by_columns else _UNNAMED

    def _ranks(self, collective: NcclTestsName | None) -> tuple[int | None, str]:
        """The number of ranks of one call, or why it is unknown."""
        listed = self.run.ranks
        if sorted(listed) != list(range(len(listed))):
            return None, f"some ranks are missing from the list of {len(listed)}"
        sizes = set(Counter(rank.group for rank in listed.values()).values())
        if len(sizes) > 1:
            return None, "the ranks are in groups of different sizes"
        by_size = self.ratio if collective in _COUNTED_PER_RANK else None
        if by_size is None and collective is not None and self.ratio not in (None, 1):
            return None, f"a size is {self.ratio} times its count, of {collective} it is the count"
        ranks = sizes.pop() if sizes else by_size
        if ranks is None:
            return None, "the log does not list the ranks"
        if by_size not in (None, ranks):
            return None, f"the log lists {ranks} ranks, but a size is {by_size} times its count"
        return ranks, "one rank alone (nccl-tests without MPI prints a table for each)" if ranks == 1 else ""
