"""What people have measured, read from files: laws of the formats, and texts that are broken.

The logs are written here after the format strings of the tools; no output of our own readers is an expectation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import TableError
from tasp_lab.measure.readers import (
    COLLECTIVES,
    MeasuredTable,
    find_tables,
    parse_nccl_tests,
    parse_pairs,
    parse_table,
)
from tasp_lab.measure.readers.file_position import parse_csv, read_text
from tasp_lab.measure.readers.table import collective_tables
from tasp_lab.schedules.collectives.kinds import NcclTestsName

TABLE = """# profile: h100-8
# collective: all_gather
# ranks: 8
# source: own: NCCL 2.26.2
# note: first
# note: second
size_B,time_us,algbw_GBps
1024,10.5,0.1
64KiB,20,3.3
"""


def test_a_table_has_its_headers_and_rows() -> None:
    table = parse_table(TABLE, "t.csv")
    assert (table.profile, table.collective, table.ranks) == ("h100-8", "all_gather", 8)
    assert (table.headers["source"], table.headers["note"]) == ("own: NCCL 2.26.2", "first\nsecond")
    assert table.rows == ((1024, 10.5e-6), (65536, 20e-6))
    assert table.reason == ""


@given(
    rows=st.lists(st.tuples(st.integers(1, 2**50), st.floats(1e-3, 1e9)), min_size=1),
    collective=st.sampled_from(COLLECTIVES),
    ranks=st.integers(1, 10**6),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_a_table_that_was_written_is_read(
    rows: list[tuple[int, float]], collective: NcclTestsName, ranks: int, newline: str
) -> None:
    head = ["# profile: p", f"# collective: {collective}", f"# ranks: {ranks}", "time_us , size_B"]
    table = parse_table(newline.join([*head, *(f"{time!r},{size}" for size, time in rows)]), "t")
    assert (table.collective, table.ranks, table.reason) == (collective, ranks, "")
    assert [row.size_bytes for row in table.rows] == [size for size, _ in rows]
    assert [row.time_s for row in table.rows] == pytest.approx([time * 1e-6 for _, time in rows])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# profile: h100-8\n", "", "no header 'profile'"),
        ("# ranks: 8\n", "# ranks:\n", "no header 'ranks'"),
        ("time_us", "oop_time_us", "no column 'time_us'"),
        ("1024,10.5,0.1\n64KiB,20,3.3\n", "", "no rows"),
        (
            TABLE,
            "",
            "no header 'profile', no header 'collective', no header 'ranks', no column 'size_B', no column 'ti",
        ),
    ],
)
def test_a_table_that_lacks_something_says_what(old: str, new: str, reason: str) -> None:
    assert parse_table(TABLE.replace(old, new), "t.csv").reason.startswith(reason)


def test_broken_rows_are_a_reason_where_the_file_may_hold_something_else() -> None:
    table = parse_table(TABLE.replace("10.5", "").replace("# ranks: 8", "# hosts: 1"), "t.csv")
    assert table.rows == ()
    assert table.reason == "no header 'ranks', t.csv, line 8: time '', expected a number, no rows"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("10.5", "0", "line 8: time '0', expected more than 0"),
        ("10.5", "-1", "line 8: time '-1', expected more than 0"),
        ("10.5", "nan", "line 8: time 'nan', expected a number"),
        ("10.5", "1e999", "line 8: time '1e999', expected a number"),
        ("10.5", "", "line 8: time '', expected a number"),
        ("10.5", '"10,5"', "line 8: time '10,5' has a comma, expected a decimal point"),
        ("1024,", "many,", "line 8: size 'many', expected a whole number of bytes above 0"),
        ("1024,", "0,", "line 8: size '0', expected a whole number of bytes above 0"),
        ("64KiB", "64K", "line 9: size '64K', expected a whole number of bytes above 0, or like 64KiB or 64KB"),
        ("all_gather", "broadcast", "line 2: collective 'broadcast', expected one of all_gather, alltoall"),
        ("ranks: 8", "ranks: 0", "line 3: ranks '0', expected a whole number, 1 or more"),
        ("ranks: 8", "ranks: eight", "line 3: ranks 'eight', expected a whole number"),
        ("# ranks: 8", "# ranks: 8\n# ranks: 9", "line 4: duplicate header 'ranks', expected only that in line 3"),
        (",0.1", "," + "1" * 200_000, "line 8: field larger than field limit"),
        (",0.1", "", "line 8: 2 cells, expected 3"),
        ("algbw_GBps", "time_us", "line 7: duplicate column"),
    ],
)
def test_a_broken_table_is_refused_in_one_line(old: str, new: str, message: str) -> None:
    with pytest.raises(TableError, match=re.escape(f"t.csv, {message}")) as caught:
        parse_table(TABLE.replace(old, new, 1), "t.csv")
    assert "\n" not in str(caught.value)


# --- nccl-tests ---------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """One version's way to print a row: the columns after the type, and what a correct result looks like."""

    keys: tuple[str, ...]
    wrong: str
    right: str
    extra: tuple[str, ...] = ()


FORMATS = {
    "2.18": Format(("redop", "root"), "#wrong", "0"),
    "unchecked": Format(("redop", "root"), "#wrong", "N/A"),
    "per iteration": Format(("redop", "root"), "#wrong", "0", ("i_min", "i_max", "i_p99", "i_cv%")),
    "2.0 reduction": Format(("redop",), "error", "4e-07"),
    "2.0": Format((), "error", "0e+00"),
    "spaced": Format(("redop", "root"), "# wrong", "0"),
}
PREFIXES = ["", "[1,0]<stdout>: ", "[1,0]<stdout>:", "0: ", " 3: ", "node1: ", "2026-01-15T12:00:01.5Z ", "[12:00:01] "]
NOISE = [
    "node1:123:456 [0] NCCL INFO Channel 00/02 : 0 1 2 3 via P2P/IPC",
    "node1:123:456 [0] NCCL WARN Call to ibv_modify_qp failed",
    "",
    "Authorization required, but no authorization protocol specified",
    "#",
]
HEAD = {"all_gather": "none", "alltoall": "none", "sendrecv": "none", "reduce_scatter": "sum", "all_reduce": "sum"}


def log(
    collective: str,
    rows: Sequence[tuple[int, float]],
    ranks: int = 2,
    form: Format = FORMATS["2.18"],
    in_place_us: float = 7.5,
    program: bool = True,
) -> list[str]:
    """A run as the tool prints it: `rows` are count and out-of-place time in us, of float elements."""
    parts = 1 if collective in ("sendrecv", "all_reduce") else ranks
    keys = {"redop": HEAD[collective], "root": "-1"}
    values = " ".join(keys[key] for key in form.keys)
    extra = " 1.00" * len(form.extra)
    group = " ".join(("time", "algbw", "busbw", form.wrong, *form.extra))
    return [
        "# nccl-tests version 2.18.3 nccl-headers=23003 nccl-library=23003",
        *([f"# Collective test starting: {collective}_perf"] if program else []),
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 validation: 1",
        "# Using devices",
        *(
            f"#  Rank {rank:2} Group  0 Pid 4{rank} on node{rank // 8} device  {rank % 8} [0000:0f:00] NVIDIA H100"
            for rank in range(ranks)
        ),
        "#                                   out-of-place                in-place",
        f"#  size  count  type  {' '.join(form.keys)}  {group}  {group}",
        "#   (B)  (elements)      (us)  (GB/s)  (GB/s)   (us)  (GB/s)  (GB/s)",
        *(
            f"  {count * 4 * parts:12}  {count:12}  float  {values}  {time:7.2f}  1.00  0.50  {form.right}{extra}"
            f"  {in_place_us:7.2f}  1.00  0.50  {form.right}{extra}"
            for count, time in rows
        ),
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 114.556",
        f"# Collective test concluded: {collective}_perf",
    ]


def only(text: str | Sequence[str], name: str = "log", in_place: bool = False) -> MeasuredTable:
    [table] = parse_nccl_tests(text if isinstance(text, str) else "\n".join(text), name, in_place=in_place)
    return table


counts_and_times = st.lists(
    st.tuples(st.integers(1, 2**30), st.integers(1, 10**9).map(lambda value: value / 100)), min_size=1, max_size=4
)


@given(
    collective=st.sampled_from(COLLECTIVES),
    rows=counts_and_times,
    ranks=st.integers(2, 20),
    form=st.sampled_from(sorted(FORMATS)),
    prefix=st.sampled_from(PREFIXES),
    in_place=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_every_version_is_read_behind_every_prefix_and_between_other_lines(
    collective: NcclTestsName,
    rows: list[tuple[int, float]],
    ranks: int,
    form: str,
    prefix: str,
    in_place: bool,
    random: object,
) -> None:
    choose: Callable[[list[str]], str] = random.choice  # type: ignore[attr-defined]
    lines = [other for line in log(collective, rows, ranks, FORMATS[form]) for other in (choose(NOISE), line)]
    table = only([prefix + line for line in lines], in_place=in_place)
    parts = 1 if collective in ("sendrecv", "all_reduce") else ranks
    times = [7.5 if in_place else time for _, time in rows]
    assert (table.collective, table.ranks, table.reason, table.warnings) == (collective, ranks, "", ())
    assert [row.size_bytes for row in table.rows] == [count * 4 * parts for count, _ in rows]
    assert [row.time_s for row in table.rows] == pytest.approx([time * 1e-6 for time in times])
    assert table.headers["gpu"] == "NVIDIA H100"
    assert int(table.headers["nodes"]) == -(-ranks // 8)


@given(first=counts_and_times, second=counts_and_times, random=st.randoms(use_true_random=False))
def test_runs_at_the_same_time_are_told_apart_by_their_prefixes(
    first: list[tuple[int, float]], second: list[tuple[int, float]], random: object
) -> None:
    logs = [log("all_gather", first, 2), log("sendrecv", second, 3)]
    queues = [[f"node{number}: {line}" for line in reversed(lines)] for number, lines in enumerate(logs)]
    mixed = []
    while queues[0] or queues[1]:
        queue = random.choice([queue for queue in queues if queue])  # type: ignore[attr-defined]
        mixed.append(queue.pop())
    tables = {table.collective: table for table in parse_nccl_tests("\n".join(mixed), "log")}
    assert [row.size_bytes for row in tables["all_gather"].rows] == [8 * count for count, _ in first]
    assert [row.size_bytes for row in tables["sendrecv"].rows] == [4 * count for count, _ in second]
    assert (tables["all_gather"].ranks, tables["sendrecv"].ranks) == (2, 3)


def test_two_runs_in_one_file_are_two_tables() -> None:
    text = "\n".join(log("all_gather", [(1, 8.0)], 2) + log("alltoall", [(1, 9.0)], 4))
    first, second = parse_nccl_tests(text, "log")
    assert (first.name, first.collective, first.ranks) == ("log, run 1", "all_gather", 2)
    assert (second.name, second.collective, second.ranks) == ("log, run 2", "alltoall", 4)


@given(rows=counts_and_times, collective=st.sampled_from(COLLECTIVES), data=st.data())
def test_a_log_cut_anywhere_keeps_its_whole_rows_and_never_makes_up_another(
    rows: list[tuple[int, float]], collective: NcclTestsName, data: st.DataObject
) -> None:
    text = "\n".join(log(collective, rows))
    whole = only(text).rows
    cut = text[: data.draw(st.integers(text.index("#  size"), text.index("# Avg")))]
    tables = parse_nccl_tests(cut, "log")
    kept = tables[0].rows if tables else ()
    assert kept == whole[: len(kept)]
    assert len(kept) >= sum(" float " in line for line in cut.split("\n")[:-1])
    assert not kept or "may be truncated" in tables[0].warnings[-1]


def test_a_row_that_other_output_cuts_is_left_out_and_named() -> None:
    lines = log("sendrecv", [(1, 8.0), (2, 9.0)])
    row = next(index for index, line in enumerate(lines) if " float " in line)
    lines[row] = lines[row][:60] + "node1:12:12 [0] NCCL INFO Launch mode Parallel and more words that fill the columns"
    table = only(lines)
    assert [size for size, _ in table.rows] == [8]
    assert table.warnings == (f"log, line {row + 1}: truncated row of size 4 skipped",)


MESSAGES = [
    "node00:41:88 [3] NCCL INFO comm 0x55 rank 3 nranks 8 - Abort COMPLETE",
    "node00:41:88 [3] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
    "gpu-7.cluster:9:9 NCCL WARN 3 # of 16 channels",
    "node1:12:13 [0] misc/socket.cc:550 NCCL WARN Net : Call to recv failed",
    "node1:12:13 [0] NCCL INFO nranks 8",
    "node1:12:13 [0] NCCL INFO a messagenode2:12:13 [1] NCCL INFO float and another",
    "[2026-01-15 12:00:01] node1:12:13 [0] NCCL INFO comm",
]


@settings(max_examples=150)
@given(
    rows=counts_and_times,
    collective=st.sampled_from(COLLECTIVES),
    prefix=st.sampled_from(["", "[1,0]<stdout>:", "0: "]),
    message=st.sampled_from(MESSAGES),
    end=st.sampled_from(["", "\n", " "]),
    data=st.data(),
)
def test_messages_of_nccl_anywhere_make_no_row_and_no_table(
    rows: list[tuple[int, float]], collective: NcclTestsName, prefix: str, message: str, end: str, data: st.DataObject
) -> None:
    """A message at the edge of a line costs nothing; inside a line at most its row, with a warning."""
    lines = [prefix + line for line in log(collective, rows)]
    text = "\n".join(lines)
    whole = only(text)
    at = data.draw(st.integers(text.index(" Rank "), text.index("# Avg")))
    table = only(text[:at] + message + end + text[at:])
    lost = [row for row in whole.rows if row not in table.rows]
    assert set(table.rows) <= set(whole.rows)
    assert len(lost) <= 1
    assert not lost or any("skipped" in warning for warning in table.warnings)
    begin = text.rindex("\n", 0, at) + 1 + len(prefix)
    if at == begin and end != "\n" and not message[-1].isdigit():
        assert (table.rows, table.reason, table.ranks) == (whole.rows, "", whole.ranks)
    if text[at] == "\n":
        assert (table.rows, table.reason, table.ranks) == (whole.rows, "", whole.ranks)


def test_a_message_before_a_row_makes_no_second_table() -> None:
    path = Path(__file__).parent / "samples" / "h100-8-all_gather-messages.log"
    (table,) = find_tables([path])
    assert (table.collective, table.ranks, table.reason, len(table.rows)) == ("all_gather", 8, "", 11)
    assert table.rows[4] == (16777216, pytest.approx(64.49e-6))


def test_a_message_of_another_process_before_a_row() -> None:
    lines = log("sendrecv", [(8, 8.0), (16, 9.0)], 3)
    prefixed = [f"[1,{line.split()[2] if ' Rank ' in line else 0}]<stdout>:{line}" for line in lines]
    row = next(place for place, line in enumerate(prefixed) if " float " in line)
    prefixed[row] = f"[1,2]<stdout>:{MESSAGES[0]}{prefixed[row]}"
    table = only(prefixed)
    assert ([size for size, _ in table.rows], table.ranks, table.reason) == ([32, 64], 3, "")


def test_other_output_before_a_row() -> None:
    lines = log("sendrecv", [(8, 8.0), (16, 9.0)])
    row = next(place for place, line in enumerate(lines) if " float " in line)
    lines[row] = f"{NOISE[3]}{lines[row]}"
    assert [size for size, _ in only(lines).rows] == [32, 64]


def test_a_size_that_lost_digits_is_no_row() -> None:
    lines = log("all_gather", [(2**18, 8.0), (2**19, 9.0), (2**20, 10.0)], 8)
    row = next(place for place, line in enumerate(lines) if " float " in line)
    lines[row : row + 1] = ["    838" + MESSAGES[0], "8608" + lines[row].partition("8388608")[2]]
    table = only(lines)
    assert [size for size, _ in table.rows] == [2**24, 2**25]
    assert len(table.warnings) == 2
    assert "a part of a row skipped" in table.warnings[0]
    assert "size 8608 does not fit 262144 elements" in table.warnings[1]


@pytest.mark.parametrize(
    ("columns", "read"),
    [("#  size  count  type  redop  root  time  algbw", 2), ("#  size  count  type  redop  root  ti", 2)],
)
def test_a_line_of_columns_that_a_message_cuts(columns: str, read: int) -> None:
    lines = log("sendrecv", [(8, 8.0), (16, 9.0)])
    place = next(place for place, line in enumerate(lines) if "count  type" in line)
    lines[place] = columns + MESSAGES[1]
    assert len(only(lines).rows) == read


def test_rows_of_no_bytes_are_left_out() -> None:
    table = only(
        [line.replace(f"{8:12}  {1:12}", f"{0:12}  {0:12}") for line in log("all_gather", [(1, 8.0), (2, 9.0)])]
    )
    assert [size for size, _ in table.rows] == [16]
    assert "rows of 0 bytes skipped" in table.warnings[0]


def edited(old: str, new: str, form: str = "2.18") -> str:
    """A log of one row of 1024 floats, changed."""
    text = "\n".join(log("all_reduce", [(1024, 10.0)], form=FORMATS[form]))
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            edited("  10.00  1.00  0.50  0", "  10.00  1.00  0.50  3"),
            "line 10: 3 wrong results of 4096 bytes, expected none",
        ),
        (edited("values : 0 OK", "values : 4 FAILED", "2.0 reduction"), "line 11: values out of bounds, expected none"),
        (edited("10.00", " 0.00"), "line 10: time '0.00', expected more than 0"),
        (edited("10.00", "-3.00"), "line 10: time '-3.00', expected more than 0"),
        (edited("10.00", "10,00"), "line 10: time '10,00' has a comma, expected a decimal point"),
        (edited("10.00", "slow"), "line 10: time 'slow', expected a number"),
        (edited("  10.00", "  10.00 1 1"), "line 10: 10 numbers after the type, expected 8"),
        (edited("4096 ", "-4096 "), "line 10: size '-4096', expected a whole number of bytes above 0"),
        (edited("4096 ", "4K "), "line 10: size '4K', expected a whole number of bytes above 0, or like 64KiB or 64KB"),
        (edited("4096 ", "4KB "), "line 10: size '4KB' is 4000 bytes, but 1024 elements are 4096, expected a multiple"),
        (edited("1024  float", "1k  float"), "line 10: count '1k', expected a whole number"),
    ],
)
def test_a_broken_log_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(TableError, match=re.escape(f"log, {message}")) as caught:
        only(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", ["4KiB", "4 KiB", "4.096KB"])
def test_a_size_edited_by_hand_may_have_a_unit(size: str) -> None:
    assert [row.size_bytes for row in only(edited("4096 ", f"{size} ")).rows] == [4096]


def test_wrong_results_of_the_other_columns_do_not_matter() -> None:
    text = edited("7.50  1.00  0.50  0", "7.50  1.00  0.50  9")
    assert len(only(text).rows) == 1
    with pytest.raises(TableError, match="9 wrong results"):
        only(text, in_place=True)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_collective_is_that_of_the_command_line_or_the_file_where_the_log_does_not_say_it(
    collective: NcclTestsName,
) -> None:
    lines = log(collective, [(8, 8.0), (16, 9.0)], 4, program=False)[:-1]
    assert only([f"+ mpirun -n 4 ./build/{collective}_perf -b 8", *lines]).collective == collective
    assert only([f"root@node1:~# ./build/{collective}_perf -b 8", *lines]).collective == collective
    assert only(lines, f"runs/{collective.replace('_', '-')}.txt").collective == collective
    from_columns = only(lines)
    if collective in ("all_gather", "alltoall"):
        assert from_columns.collective is None
        assert "does not name its collective: expected a file name such as all_gather.log" in from_columns.reason
        assert only([f"# collective: {collective}", *lines]).collective == collective
    else:
        assert from_columns.collective == collective


def test_a_command_line_is_of_the_next_run_only() -> None:
    lines = log("alltoall", [(8, 8.0)], program=False)[:-1]
    text = "\n".join(["./alltoall_perf", *lines, *lines, "./all_gather_perf", *lines])
    assert [table.collective for table in parse_nccl_tests(text, "log")] == ["alltoall", None, "all_gather"]


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("all_gather.log", "all_gather"),
        ("runs/AllGather-h100.log.txt", "all_gather"),
        ("all_gather/2026-01-15.log", "all_gather"),
        ("sendrecv/all_gather.out", "all_gather"),
        ("slurm-all-to-all_v100.out", "alltoall"),
        ("alltoallv.log", None),
        ("all_gather-alltoall/log.txt", None),
        ("log.txt", None),
    ],
)
def test_the_name_of_a_file_or_of_its_folders_is_the_collective(name: str, collective: str | None) -> None:
    lines = log("all_gather", [(8, 8.0), (16, 9.0)], program=False)[:-1]
    assert only(lines, name).collective == collective


def test_a_name_that_its_columns_contradict_is_not_believed() -> None:
    lines = log("all_reduce", [(8, 8.0)], program=False)[:-1]
    assert only(lines, "sendrecv.log").reason == "it is called sendrecv, but its columns are those of all_reduce"
    with pytest.raises(TableError, match="log, line 1: collective 'broadcast', expected one of all_gather"):
        only(["# collective: broadcast", *lines])


def test_another_collective_is_named() -> None:
    table = only([line.replace("all_reduce", "broadcast") for line in log("all_reduce", [(8, 8.0)])])
    assert table.collective is None
    assert "'broadcast' is none of all_gather" in table.reason


def test_ranks_follow_from_the_list_or_from_the_count() -> None:
    lines = [line for line in log("all_gather", [(8, 8.0)], 5) if " Rank " not in line]
    assert only(lines).ranks == 5
    lines = [line for line in log("sendrecv", [(8, 8.0)], 5) if " Rank " not in line]
    assert (only(lines).ranks, only(lines).reason) == (None, "the log does not list the ranks")


def test_ranks_that_other_processes_list_are_counted() -> None:
    lines = log("sendrecv", [(8, 8.0)], 3)
    prefixed = [f"[1,{line.split()[2] if ' Rank ' in line else 0}]<stdout>: {line}" for line in lines]
    assert (only(prefixed).ranks, only(prefixed).collective) == (3, "sendrecv")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Rank  2 ", "Rank  9 ", "some ranks are missing from the list of 4"),
        ("Rank  3 Group  0", "Rank  3 Group  1", "the ranks are in groups of different sizes"),
    ],
)
def test_ranks_that_do_not_fit_are_not_counted(old: str, new: str, reason: str) -> None:
    table = only("\n".join(log("all_gather", [(2, 8.0)], 4)).replace(old, new))
    assert (table.ranks, table.reason) == (None, reason)


def test_ranks_that_contradict_the_count_are_not_believed() -> None:
    text = "\n".join(log("all_gather", [(2, 8.0)], 4)).replace(f"{2:12}  float", f"{1:12}  float")
    assert only(text).reason == "the log lists 4 ranks, but a size is 8 times its count"


def test_groups_are_communicators_of_their_own() -> None:
    lines = [re.sub(r"(Rank +([0-9]+)) Group  0", r"\1 Group  \2", line) for line in log("sendrecv", [(8, 8.0)], 4)]
    halves = [line.replace("Group  2", "Group  0").replace("Group  3", "Group  1") for line in lines]
    assert (only(halves).ranks, only(halves).headers["groups"]) == (2, "2")


def test_one_rank_alone_measures_nothing() -> None:
    assert "one rank alone" in only(log("all_reduce", [(8, 8.0)], 1)).reason


def test_times_of_the_cpu_and_missing_columns_are_named() -> None:
    text = "\n".join(log("all_reduce", [(8, 8.0)]))
    assert "option -C" in only(text.replace("time ", "cputime ")).reason
    out_of_place_only = [re.sub(r"  time algbw busbw #wrong$", "", line) for line in log("all_reduce", [(8, 8.0)])]
    shorter = [re.sub(r"     7.50 .*", "", line) for line in out_of_place_only]
    assert only(shorter).rows == ((32, 8e-6),)
    assert only(shorter, in_place=True).reason == "no in-place columns"


def test_time_stamps_after_the_rows_are_no_numbers() -> None:
    lines = [
        line
        + ("  2026-01-15 12:00:01" if " float " in line else " timestamp" if "# size" in " ".join(line.split()) else "")
        for line in log("all_reduce", [(8, 8.0)])
    ]
    assert only(lines).rows == ((32, 8e-6),)
    assert only(lines, in_place=True).rows == ((32, 7.5e-6),)


def test_text_without_a_run_has_no_table() -> None:
    assert parse_nccl_tests("\n".join(NOISE * 3), "log") == []


def test_a_long_log_is_read_in_time_that_grows_with_its_length() -> None:
    line = NOISE[0] + " 1 2 3 4 5 6 7 8 9 10 11 12" * 20 + "\n"
    assert parse_nccl_tests(line * 2000 + " " * 100_000 + "1 " * 20_000 + "\n" + "#" * 5_000, "log") == []


def refusal(parse: Callable[[str, str], object], text: str) -> str:
    try:
        parse(text, "log")
    except TableError as error:
        return str(error)
    return ""


@given(
    text=st.sampled_from(["log", "table", "cuda", "amd"]),
    start=st.integers(0, 2000),
    length=st.integers(0, 40),
    new=st.text(max_size=10)
    | st.sampled_from([" ", "\n", "-1", "0", "#", "# Rank 1", " 7 float ", "GPU 00", "R0", ","]),
)
def test_whatever_is_edited_nothing_but_a_table_error_of_one_line_is_raised(
    text: str, start: int, length: int, new: str
) -> None:
    whole = {"log": edited("4096", "4096"), "table": TABLE, "cuda": CUDA, "amd": AMD}[text]
    start %= len(whole)
    broken = whole[:start] + new + whole[start + length :]
    for parse in (parse_nccl_tests, parse_table, parse_pairs):
        assert re.fullmatch(r"|log, line [0-9]+: .+, expected .+", refusal(parse, broken))


# --- files --------------------------------------------------------------------------------------------------------


def test_tables_are_found_in_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "b.csv").write_text(TABLE)
    (tmp_path / "deep" / "er" / "a.log").write_text("\n".join(log("sendrecv", [(1, 2.0)])))
    (tmp_path / "deep" / "notes.txt").write_bytes(b"nothing here \xff\x00")
    (tmp_path / "deep" / "other.json").write_text("{")
    (tmp_path / "first.dat").write_text("\n".join(log("alltoall", [(1, 2.0)])))
    tables = find_tables([tmp_path / "first.dat", tmp_path, tmp_path / "deep"])
    assert [table.collective for table in tables] == ["alltoall", "all_gather", "sendrecv"]
    assert [table.profile for table in tables] == [None, "h100-8", None]


def test_a_file_without_a_table_is_refused_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert find_tables([tmp_path]) == ()
    with pytest.raises(TableError, match=r"notes\.txt: no measurement in it, expected a CSV table"):
        find_tables([tmp_path / "notes.txt"])
    with pytest.raises(TableError, match=r"none\.csv: cannot be read: No such file"):
        find_tables([tmp_path / "none.csv"])


# --- pairs of GPUs ------------------------------------------------------------------------------------------------

square = st.integers(1, 8).flatmap(
    lambda n: st.lists(st.integers(1, 10**7).map(lambda value: value / 100), min_size=n * n, max_size=n * n).map(
        lambda cells: np.array(cells).reshape(n, n)
    )
)


def cuda_matrix(title: str, values: np.ndarray, corner: str = "D\\D") -> list[str]:
    heads = "".join(f"{gpu:6} " for gpu in range(len(values)))
    rows = [f"{gpu:6} " + "".join(f"{value:6.2f} " for value in row) for gpu, row in enumerate(values)]
    return [title, f"   {corner}{heads}" if corner == "D\\D" else f"   {corner} {heads}", *rows]


@given(values=square, method=st.sampled_from(["Writes", "Reads", None]))
def test_the_sender_is_in_the_row_whatever_the_version(values: np.ndarray, method: str | None) -> None:
    note = f" (P2P {method})" if method else ""
    printed = values.T if method != "Writes" else values
    text = "\n".join(
        [
            "P2P Connectivity Matrix",
            *cuda_matrix("     D\\D", np.ones_like(values)),
            *cuda_matrix("Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)", 2 * values),
            *cuda_matrix(f"Unidirectional P2P=Enabled Bandwidth{note} Matrix (GB/s)", printed),
            *cuda_matrix("Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)", 3 * values),
            *cuda_matrix(f"P2P=Enabled Latency{note} Matrix (us)", 4 * printed, "GPU"),
            "",
            *cuda_matrix("", 7 * printed, "CPU"),
        ]
    )
    (enabled,) = parse_pairs(text, "log")
    assert enabled.kind == "unidirectional"
    np.testing.assert_allclose(enabled.bandwidth_bytes_per_s, values * 1e9)


def amd_matrix(values: np.ndarray, corner: str, arrow: str = "", tail: str = "", cpus: int = 0) -> list[str]:
    """A matrix of TransferBench with `cpus` columns and rows of CPUs before those of the GPUs."""
    names = [f"CPU {cpu:02}" for cpu in range(cpus)] + [f"GPU {gpu:02}" for gpu in range(len(values))]
    full = np.full((len(names), len(names)), 3.0)
    full[cpus:, cpus:] = values
    lines = [f"{corner} " + "  ".join(names) + tail]
    for name, row in zip(names, full, strict=True):
        cells = "".join(f"{value:10.3f}  " if value > 0 else "       N/A  " for value in row)
        lines.append(f"{name} {arrow}{cells}" + (" 1.0 2.0" if tail else ""))
        if arrow:
            lines += [f"{name} <- " + cells.replace("1", "2"), f"{name} <->" + cells.replace("1", "4")]
    return lines


@given(values=square)
def test_matrices_of_transfer_bench_are_read(values: np.ndarray) -> None:
    np.fill_diagonal(values, 0)
    text = "\n".join(
        [
            "GPU-GFX All-To-All benchmark:",
            "- Copying 1048576 bytes between all pairs of GPUs using 8 CUs (56 Transfers)",
            "Summary:",
            *amd_matrix(values, "SRC\\DST", tail="    STotal      Actual"),
            "RTotal  1.0 2.0",
            "Bytes Per Direction 67108864",
            "Unidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: GFX)",
            *amd_matrix(values, " SRC+EXE\\DST", cpus=2),
            "Averages (During UniDir):    103.69     44.91     55.25     57.32",
            "Bidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: GFX)",
            *amd_matrix(2 * values, "     SRC\\DST", " ->", cpus=2),
        ]
    )
    tables = parse_pairs(text, "log")
    assert [table.kind for table in tables] == ["all-to-all", "unidirectional"]
    for table in tables:
        np.testing.assert_allclose(table.bandwidth_bytes_per_s, np.where(values > 0, values * 1e9, np.nan))


CUDA = "\n".join(cuda_matrix("Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)", np.full((3, 3), 5.0)))
AMD = "\n".join(amd_matrix(np.full((3, 3), 5.0), "SRC\\DST", tail="    STotal      Actual"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CUDA.replace("GB/s", "MB/s"), "line 1: unit 'MB/s', expected GB/s for bandwidths"),
        (CUDA.replace("5.00", "-5.0", 1), "line 3: value '-5.0', expected more than 0"),
        (CUDA.replace("5.00", "0.00", 1), "line 3: value '0.00', expected more than 0"),
        (CUDA.replace("5.00", "5,00", 1), "line 3: value '5,00' has a comma, expected a decimal point"),
        (CUDA[:-2], "line 5: truncated value '5.0', expected 2 decimals as in the others"),
        (CUDA[:-8], "line 5: 2 cells, expected 3, one per column"),
        (CUDA[:-26], "line 2: column 2 without a row, expected one row per column"),
        (CUDA.splitlines()[0], "line 1: no line with GPU numbers below, expected one"),
        (AMD.replace("5.000", "fast", 1), "line 2: value 'fast', expected a number"),
        (AMD[:-20], "line 4: 2 cells, expected 3, one per column"),
        (AMD[:-40], "line 4: 0 cells, expected 3, one per column"),
        (AMD[: AMD.index("GPU 02 ", 60)], "line 1: column GPU 02 without a row"),
        (
            "\u2502 SRC+EXE\\DST \u2502 Rank 00 \u2502",
            "line 1: a table of several hosts, expected the GPUs of one host",
        ),
    ],
)
def test_broken_tables_of_pairs_are_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TableError, match=re.escape(f"{path}, {message}")) as caught:
        parse_pairs(read_text(path), str(path))
    assert "\n" not in str(caught.value)


def test_a_file_with_keys_as_columns_has_a_table_for_each_combination() -> None:
    head = "# source: a page\nlibrary,profile,collective,ranks,size_B,time_us\n"
    rows = ["nccl==2.28,h100-8,all_gather,8,1024,10", "nccl==2.29,h100-8,all_gather,8,1024,11",
            "nccl==2.28,h100-8,all_gather,8,2048,12"]  # fmt: skip
    old, new = collective_tables(parse_csv(head + "\n".join(rows), "t.csv"))
    assert (old.rows, new.rows) == (((1024, 10e-6), (2048, 12e-6)), ((1024, 11e-6),))
    assert [table.headers["library"] for table in (old, new)] == ["nccl==2.28", "nccl==2.29"]
    assert {table.headers["source"] for table in (old, new)} == {"a page"}
    assert old.name != new.name


def test_a_key_may_not_be_a_header_and_a_column() -> None:
    with pytest.raises(TableError, match="'ranks' is a header and a column, expected one of them"):
        collective_tables(parse_csv("# ranks: 8\nranks,size_B,time_us\n8,1,1\n", "t.csv"))
