"""The account of the error: what is compared, what is left out and why, and what a script gets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.errors import TableError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.parameters import changed
from tasp_lab.machines.profile import load_profile, member, profile_document, profile_names
from tasp_lab.machines.sampling import NO_SAMPLES, NORMAL_95
from tasp_lab.measure.accuracy import accuracy, evaluate, own_tables
from tasp_lab.measure.accuracy.report import coverage_of
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.profiles import machine_of
from tasp_lab.measure.readers import find_tables, parse_table
from tasp_lab.measure.scores import Span
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.residuals import Regime, residual_of
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tests.conftest import ROOT, Command

HEAD = "# profile: h100-8\n# collective: sendrecv\n# ranks: 8\n# source: a test\nsize_B,time_us\n"
INSIDE = Regime("collective", "intra", "large", "documented", "modelled")
FIELDS = {
    "file", "profile", "collective", "ranks", "in_scope", "reason", "mean_relative_error", "worst_relative_error",
    "bias", "dominant_rule",
}  # fmt: skip


def predicted_us(size: int) -> float:
    machine = member("h100-8")
    assert machine is not None
    return float(simulate(library_schedule("sendrecv", machine.topology, size), machine).time_s) * 1e6


def test_errors_are_predicted_over_measured() -> None:
    """A table of twice and half the prediction: errors of -1/2 and 1."""
    rows = f"{2**20},{2 * predicted_us(2**20)}\n{2**30},{predicted_us(2**30) / 2}\n"
    found = evaluate(parse_table(HEAD + rows, "t.csv")).to_dict()
    assert found["mean_relative_error"] == pytest.approx(0.75)
    assert found["worst_relative_error"] == pytest.approx(1)
    assert found["bias"] == pytest.approx(0.25)
    assert (found["in_scope"], found["reason"]) == (True, "")


def test_a_machine_that_the_catalogue_describes_is_a_profile_too() -> None:
    """PCIe nodes are of no family."""
    name, size = "rtx-pro-6000-8-pcie", 2**30
    found = evaluate(parse_table(HEAD.replace("h100-8", name) + f"{size},20000\n", "t.csv"))
    assert found.in_scope
    (row,) = found.rows
    machine = load_machine(name)
    assert row.predicted_s == simulate(library_schedule("sendrecv", machine.topology, size), machine).time_s


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# profile: h100-8\n", "", "no header 'profile'"),
        ("h100-8", "hal-9000", "there is no profile 'hal-9000'"),
        ("ranks: 8", "ranks: 16", "h100-8 has 8 ranks, the table 16"),
        ("sendrecv", "all_reduce\n# algorithm: SHARP", "all-reduce by SHARP"),
        ("# source", "# out_of_scope: broken cable\n# source", "broken cable"),
        ("h100-8", "h100-9", "1 node of 9 ranks, expected at most 8"),
        ("h100-8\n# collective: sendrecv\n# ranks: 8", "h100-1\n# collective: all_gather\n# ranks: 1", "sends nothing"),
        ("# source", "# from_size_B: 2MiB\n# source", "no size that counts"),
    ],
)
def test_what_is_not_compared_says_why(old: str, new: str, reason: str) -> None:
    found = evaluate(parse_table(HEAD.replace(old, new) + "1048576,100\n", "t.csv"))
    assert not found.in_scope
    assert reason in found.reason
    assert found.to_dict()["mean_relative_error"] is None


def test_sizes_that_do_not_count_are_shown_all_the_same() -> None:
    head = HEAD.replace("# source", "# from_size_B: 2000000\n# source")
    found = evaluate(parse_table(f"{head}1048576,1\n4194304,{predicted_us(4194304)}\n", "t.csv"))
    assert [row.in_scope for row in found.rows] == [False, True]
    assert found.to_dict()["worst_relative_error"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("text", ["lots", "-5", "1.5B", "9" * 5000, "1MiB\n# from_size_B: 2MiB"])
def test_a_first_size_that_is_none(text: str) -> None:
    with pytest.raises(TableError, match=r"t\.csv, line [56]: "):
        parse_table(f"{HEAD.replace('size_B', f'# from_size_B: {text}' + chr(10) + 'size_B')}1048576,1\n", "t.csv")


def test_rings_are_compared_where_the_table_says_ring() -> None:
    text = HEAD.replace("sendrecv", "all_reduce\n# algorithm: ring") + "1073741824,5400\n"
    found = evaluate(parse_table(text, "t.csv"))
    assert found.in_scope
    assert found.dominant_rule == "ring rate"


@pytest.mark.parametrize(
    ("machine", "ranks", "collective", "size", "busbw"),
    [
        ("gb200-2x2x4", 16, "all_gather", 16, 378),
        ("gb200-2x2x4", 16, "reduce_scatter", 16, 379),
        ("gb200-2x2x4", 16, "alltoall", 16, 88),
        ("gb200-2x1x4", 8, "all_reduce", 8, 326),
    ],
)
def test_gb200_nodes_in_domains_of_their_own(
    machine: str, ranks: int, collective: str, size: int, busbw: float
) -> None:
    """GB/s of A4X across domains, from a public test plan: a domain sends what its NICs carry, 47 GB/s each."""
    share = 2 * (ranks - 1) / ranks if collective == "all_reduce" else (ranks - 1) / ranks
    size_bytes = size * 2**30
    head = HEAD.replace("h100-8", machine).replace("sendrecv", collective).replace("ranks: 8", f"ranks: {ranks}")
    found = evaluate(parse_table(f"{head}{size_bytes},{size_bytes * share / busbw / 1e3}\n", "t.csv"))
    error = found.to_dict()["mean_relative_error"]
    assert isinstance(error, float)
    assert error < 0.02


def test_every_table_of_ours_names_its_source_and_a_profile() -> None:
    tables = find_tables(sorted(own_tables().glob("*.csv")))
    assert len(tables) > 60
    for table in tables:
        assert not table.reason, table.name
        assert table.headers["source"]
        assert table.profile is not None
        assert table.profile.partition("-")[0] in profile_names()


def test_the_command(command: Command, tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text(HEAD + f"1048576,{predicted_us(2**20)}\n")
    (tmp_path / "bare.csv").write_text("size_B,time_us\n1048576,80\n")
    found = json.loads(command("accuracy", str(tmp_path), "--json").stdout)
    bare, good = found["tables"]
    assert set(good) >= FIELDS
    assert good["mean_relative_error"] == pytest.approx(0, abs=1e-9)
    assert (bare["in_scope"], bare["mean_relative_error"]) == (False, None)
    assert bare["reason"].startswith("no header 'profile'")
    assert found["median_relative_error"] == good["mean_relative_error"]
    shown = command("accuracy", str(tmp_path)).stdout
    assert "good.csv" in shown
    assert "no header" in shown


@pytest.mark.parametrize(
    ("name", "content", "telling"),
    [
        ("empty.csv", b"", "empty.csv: is empty, expected a table of measurements"),
        ("blank.csv", b"\n \n\t\n", "blank.csv: is empty, expected a table of measurements"),
        ("binary.csv", bytes(range(256)), "binary.csv: is no text, expected a table of measurements"),
        ("empty.log", b"", "empty.log: is empty, expected a table of measurements"),
        ("binary.log", b"\x7fELF\x00\x00", "binary.log: is no text, expected a table of measurements"),
        ("notes.csv", b"day,mood\n1,2\n", "notes.csv: nothing to compare: "),
        ("picture.png", b"", "folder: no table in it, expected CSV tables (.csv) or logs of nccl-tests"),
        (None, b"", "folder: no table in it, expected CSV tables (.csv) or logs of nccl-tests"),
    ],
)
def test_nothing_to_compare_is_an_error(command: Command, name: str | None, content: bytes, telling: str) -> None:
    folder = command.folder / "folder"
    folder.mkdir()
    if name is not None:
        (folder / name).write_bytes(content)
    named = "folder" if name is None or name == "picture.png" else f"folder/{name}"
    assert telling in command.refused("accuracy", named)
    picture = command.folder / "picture.svg"
    assert telling in command.refused("accuracy", named, "--plot", str(picture))
    assert not picture.exists()


def test_several_tables_that_cannot_be_compared_are_counted(command: Command) -> None:
    for name in ("a.csv", "b.csv", "c.csv"):
        (command.folder / name).write_text("size_B,time_us\n1024,5\n")
    assert "a.csv: nothing to compare: no header" in command.refused("accuracy", ".")
    assert "(and 2 other tables)" in command.refused("accuracy", ".")


def test_the_whole_account_stands() -> None:
    """What the aims of the project ask of the tables of eight H100, of which no constant was fitted."""
    names = ("h100_xxrjun_1x8_sendrecv", "h100_xxrjun_1x8_all_gather", "h100_xxrjun_1x8_alltoall")
    found = accuracy(*(own_tables() / f"{name}.csv" for name in names))
    means = [float(abs(table.errors).mean()) for table in found]
    for mean, aim in zip(means, (0.03, 0.05, 0.05), strict=True):
        assert mean <= aim


def test_two_workers_and_one_give_equal_reports() -> None:
    names = ("mi300x_amd_8_all_reduce", "h100_azure_8_all_reduce", "h200_dranet_2x1_all_gather")
    paths = [own_tables() / f"{name}.csv" for name in names]
    alone, shared = (accuracy(*paths, sampling=NO_SAMPLES, jobs=jobs).to_dict() for jobs in (1, 2))
    for report in (alone, shared):
        report["provenance"].pop("date")  # type: ignore[attr-defined]
    assert alone == shared


def h100_with_payload(payload: float) -> str:
    """A profile file."""
    h100 = load_profile("h100")
    return profile_document(h100.with_parameters(changed(h100.parameters, {"link_payload": payload})))


def test_a_profile_of_ones_own_is_found_beside_the_table(command: Command) -> None:
    """Wherever the command runs; of two profiles of one name, each table has that of its own folder."""
    for folder, payload in (("fast", 340e9), ("slow", 34e9)):
        home = command.folder / "tables" / folder
        home.mkdir(parents=True)
        (home / "my.toml").write_text(h100_with_payload(payload))
        (home / "t.csv").write_text(HEAD.replace("h100-8", "my.toml") + f"{2**30},{2**30 / payload * 1e6}\n")
    done = command("accuracy", "tables", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [table["profile"] for table in document["tables"]] == ["my.toml", "my.toml"]
    assert max(table["worst_relative_error"] for table in document["tables"]) < 0.05
    assert list(document["provenance"]["inputs"]["machines"]) == ["my.toml", "my.toml (2)"]


def test_a_profile_beside_the_table_comes_before_that_of_the_working_directory(command: Command) -> None:
    for folder, payload in ((command.folder, 34e9), (command.folder / "mine", 340e9)):
        folder.mkdir(exist_ok=True)
        (folder / "my.toml").write_text(h100_with_payload(payload))
    text = HEAD.replace("h100-8", "my.toml:1x8") + f"{2**30},{2**30 / 340e9 * 1e6}\n"
    (command.folder / "mine" / "t.csv").write_text(text)
    (command.folder / "other").mkdir()
    (command.folder / "other" / "t.csv").write_text(text)
    beside, elsewhere = json.loads(command("accuracy", "mine", "other", "--json").stdout)["tables"]
    assert beside["worst_relative_error"] < 0.05
    assert elsewhere["worst_relative_error"] > 5


def test_the_hash_of_the_inputs_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    hashes = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "my.toml").write_text(profile_document(load_profile("h100")))
        (folder / "t.csv").write_text(HEAD.replace("h100-8", "my.toml") + "1048576,100\n")
        hashes.add(accuracy(folder).provenance.inputs_sha256)
    assert len(hashes) == 1


LOG = ROOT / "tests" / "measure" / "readers" / "samples" / "h100-8-all_gather.log"


def log_of(**replaced: str) -> str:
    """The sample log with other words, by what they replace."""
    text = LOG.read_text()
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def profiles(command: Command, *arguments: str) -> tuple[list[str], list[str]]:
    """The machines that tables are compared with, and the notes."""
    done = command("accuracy", *arguments, "--samples", "0", "--json")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    return [table["profile"] for table in found["tables"]], found["notes"]


def test_the_machine_of_a_log_is_named_on_the_command_line_or_in_the_log(command: Command) -> None:
    (command.folder / "a.log").write_text(LOG.read_text())
    (command.folder / "named.log").write_text("# profile: h200-8\n" + LOG.read_text())
    (command.folder / "a.csv").write_text(HEAD.replace("# profile: h100-8\n", "") + "1048576,50\n")
    for name in ("h800-8", "h800"):
        assert profiles(command, "a.log", "--profile", name) == (["h800-8"], [])
    assert profiles(command, "a.csv", "named.log", "--profile", "h800") == (["h800-8", "h200-8"], [])
    assert profiles(command, "named.log") == (["h200-8"], [])
    (command.folder / "my.toml").write_text(profile_document(load_profile("h800")))
    assert profiles(command, "a.log", "--profile", "my.toml:1x8") == (["my.toml:1x8"], [])


def test_a_log_of_a_full_node_is_taken_by_its_gpus(command: Command) -> None:
    (command.folder / "a.log").write_text(LOG.read_text())
    found, (note,) = profiles(command, "a.log")
    assert found == ["h100-8"]
    assert note.startswith("a.log: taken as h100-8, by its 8 NVIDIA H100 80GB HBM3; ")


def on_other_nodes(*ranks: int) -> dict[str, str]:
    """The lines of some ranks in the log, on another node."""
    return {f"Rank  {rank} Group  0 Pid   4117 on     node1": f"Rank  {rank} Pid 4 on node2" for rank in ranks}


@pytest.mark.parametrize(
    ("replaced", "suggested"),
    [
        ({"H100 80GB HBM3": "H100 PCIe"}, "h100-8"),
        (on_other_nodes(7), "h100-8"),
        (on_other_nodes(4, 5, 6, 7), "h100-2x4"),
    ],
)
def test_other_logs_are_no_guess(command: Command, replaced: dict[str, str], suggested: str) -> None:
    """A GPU without a family, and nodes behind a network that the GPUs do not tell."""
    (command.folder / "a.log").write_text(log_of(**replaced))
    line = command.refused("accuracy", "a.log")
    assert "a.log: nothing to compare: the table does not name its machine, expected --profile, like --profile " in line
    assert f"--profile {suggested}, or a line # profile: {suggested} in the file" in line


def test_unknown_machines_are_one_clear_line(command: Command) -> None:
    (command.folder / "a.log").write_text(LOG.read_text())
    (command.folder / "b.log").write_text("# profile: h10-8\n" + LOG.read_text())
    assert "unknown profile 'h10-8', did you mean 'h100'? expected one of a100, " in command.refused(
        "accuracy", "a.log", "--profile", "h10-8"
    )
    assert "there is no profile 'h10-8', did you mean 'h100-8'?" in command.refused("accuracy", "b.log")
    assert "h100-2x8 has 16 ranks, the table 8" in command.refused("accuracy", "a.log", "--profile", "h100-2x8")


def test_a_reason_of_several_lines_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        HEAD.replace("# source", "# out_of_scope: a broken cable\n# out_of_scope: and no switch\n# source")
        + "1048576,5\n"
    )
    with pytest.raises(TableError, match=r"a\.csv: nothing to compare: a broken cable and no switch$"):
        accuracy(path)


@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "b200_sxm"])
def test_a_system_is_judged_without_the_constants_that_its_tables_gave(system: str) -> None:
    """Every constant of the machine whose source is the system has another value and source there."""
    tables = find_tables([own_tables() / "aiconfigurator_one_node.csv"])
    table = next(each for each in tables if each.headers["system"] == system)
    own, judged = machine_of(table), machine_of(table, left_out=True)
    of_system = {name for name, each in own.parameters.items() if _is_measured_on(system, each.source)}
    assert {"base_ll", "ring_rate", "message_launch"} <= of_system
    assert not [name for name, each in judged.parameters.items() if _is_measured_on(system, each.source)]
    assert all(judged.parameters[name].value != own.parameters[name].value for name in of_system)
    assert judged.comm_library.tuner == own.comm_library.tuner  # type: ignore[attr-defined]


def _is_measured_on(system: str, source: str) -> bool:
    return source.startswith("measured") and f" {system}," in source


@given(st.floats(0.3, 3.0), st.floats(0.05, 1.0), st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=9))
@settings(max_examples=30, deadline=None)
def test_the_position_of_a_measured_time_is_where_it_lies_in_its_interval(
    middle: float, spread: float, deviations: list[float]
) -> None:
    """A time at the median is at 0.5 of an interval of one log-normal error, its ends at 0 and 1."""
    residual = replace(residual_of(INSIDE), middle=middle, spread=spread, constants=0.0)
    interval = Interval(1.0, np.zeros(0), residual)
    assume(interval.quantile_s(0.05) <= 1.0 <= interval.quantile_s(0.95))  # it is not stretched to the prediction
    rows = [
        MeasuredRow(middle * math.exp(spread * each), 1.0, interval=interval, shape={"profile": "h100-8"})
        for each in deviations
    ]
    table = TableAccuracy(parse_table(HEAD + "1048576,100\n", "t.csv"), "", tuple(rows))
    (found,) = coverage_of([table])
    assert found["position"] == pytest.approx(0.5 + median(deviations) / (2 * NORMAL_95), abs=1e-6)
    assert found["inside"] == pytest.approx(sum(abs(each) <= NORMAL_95 for each in deviations) / len(rows), abs=1e-9)
    assert found["high_over_low"] == pytest.approx(math.exp(2 * NORMAL_95 * spread))
    shipped = residual_of(INSIDE)
    assert found["shipped"] == pytest.approx(math.exp(2 * NORMAL_95 * shipped.spread), rel=0.2)
    assert interval.median_s == pytest.approx(middle)


def test_a_system_that_gave_no_constant_is_judged_as_it_is() -> None:
    tables = find_tables([own_tables() / "aiconfigurator_one_node.csv"])
    table = next(each for each in tables if each.headers["system"] == "gb300")
    assert machine_of(table, left_out=True) == machine_of(table)


@pytest.mark.parametrize(("measured_s", "score"), [(2.0, 1.5), (5.0, (3.0 + 20) / 5), (0.5, (3.0 + 10) / 0.5)])
def test_the_score_of_an_interval_is_its_width_and_twenty_times_what_is_outside(
    measured_s: float, score: float
) -> None:
    span = Span(1.0, 4.0, measured_s)
    assert span.score == pytest.approx(score)
    assert span.is_inside == (measured_s == 2.0)
