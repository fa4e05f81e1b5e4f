"""Profiles from measurements: constants that a simulated machine has are found again, the others stay as they were."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.calibration import calibrate as calibrate_pairs
from sim.simulate import simulate
from tasp_lab.cli.process import main
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, TableError, TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.machines.machine_file import topology_document
from tasp_lab.machines.parameters import Parameters, changed, nearest_possible
from tasp_lab.machines.profile import Profile, load_profile, member, profile_document, profile_names
from tasp_lab.measure.calibrate import calibrate as calibrate_files
from tasp_lab.measure.calibrate import pair_figure, pair_findings
from tasp_lab.measure.fit.cases import Case, Simulated, cases_of, measured
from tasp_lab.measure.fit.fit_profile import Calibrated, calibrate, candidates
from tasp_lab.measure.profiles import Choice
from tasp_lab.measure.readers import MeasuredTable, PairTable, Row, parse_nccl_tests
from tasp_lab.measure.readers.pairs import Kind
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tasp_lab.topology.builders import switch
from tasp_lab.validation.fabrics import measured_machine
from tests.conftest import Command
from tests.runtime.test_calibration import LAUNCH_S, FakeRanks

Refused = Callable[..., str]

H100 = load_profile("h100")
SIZES = tuple(2**power for power in range(15, 33))
TRUE = {
    "link_payload": 340e9, "link_many_payload": 300e9, "message_launch": 25e-6, "link_channel_rate": 18e9,
    "ring_rate": 320e9, "base_simple": 15e-6,
}  # fmt: skip
"""Constants of a machine that is not the profile's."""


def table(
    collective: NcclTestsName, times_s: Iterable[float], sizes: Sequence[int] = SIZES, size: str = "8"
) -> MeasuredTable:
    rows = tuple(Row(size_bytes, float(time_s)) for size_bytes, time_s in zip(sizes, times_s, strict=True))
    ranks = int(np.prod([int(part) for part in size.split("x")]))
    return MeasuredTable(f"{collective}.csv", {"profile": f"h100-{size}"}, collective, ranks, rows)


def made(collective: NcclTestsName, noise: float = 0.0, sizes: Sequence[int] = SIZES, seed: int = 0) -> MeasuredTable:
    """What a machine with the true constants would measure."""
    (case,) = cases_of([table(collective, np.ones(len(sizes)), sizes)], Choice(H100, "8"))
    times_s = Simulated(H100, [case])(changed(H100.parameters, TRUE))
    return table(collective, times_s * np.exp(noise * np.random.default_rng(seed).normal(size=len(sizes))), sizes)


def calibrated(*tables: MeasuredTable, names: Sequence[str] = ()) -> Calibrated:
    cases = cases_of(tables, Choice(H100, ""))
    return calibrate(H100, cases, Simulated(H100, cases), names, date="2026-01-15")


def log(measured_table: MeasuredTable, wrong: int = 0) -> str:
    """The log that nccl-tests would print of a table; its in-place times are twice as long."""
    ranks = measured_table.ranks or 0
    parts = 1 if measured_table.collective in ("sendrecv", "all_reduce") else ranks
    lines = [f"# NcclTestsName test starting: {measured_table.collective}_perf"]
    lines += [
        f"#  Rank {rank} Group 0 Pid 4{rank} on node1 device {rank} [0000:0f:00] NVIDIA H100" for rank in range(ranks)
    ]
    lines.append("# size count type redop root time algbw busbw #wrong time algbw busbw #wrong")
    for size_bytes, time_s in measured_table.rows:
        us = time_s * 1e6
        count = size_bytes // parts // 4
        lines.append(f" {size_bytes} {count} float none -1 {us:.2f} 0.1 0.1 {wrong} {2 * us:.2f} 0.1 0.1 {wrong}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1", ""])


@pytest.mark.parametrize(
    ("collective", "told"),
    [
        ("sendrecv", {"link_payload", "message_launch", "link_channel_rate"}),
        ("alltoall", {"link_many_payload", "message_launch", "link_channel_rate"}),
        ("all_gather", {"ring_rate", "base_simple"}),
    ],
)
def test_constants_of_the_machine_that_measured_are_found(collective: NcclTestsName, told: set[str]) -> None:
    """Within their intervals: twice as wide, noise never carries them further."""
    found = calibrated(made(collective, noise=0.01, sizes=SIZES[::2]))
    known = {finding.name: finding for finding in found.findings if finding.identifiable}
    assert told <= known.keys()
    for name, finding in known.items():
        truth = TRUE.get(name, H100.parameters.numbers[name])
        assert abs(np.log(finding.value / truth)) <= 2 * np.log(finding.high / finding.value)
        assert finding.low < finding.value < finding.high
    (before,), (after,) = found.errors(found.before_s), found.errors(found.after_s)
    assert abs(after).mean() < 0.02 < abs(before).mean()


def test_exact_measurements_give_exact_constants() -> None:
    found = calibrated(made("sendrecv", sizes=SIZES[::3]))
    for finding in found.findings:
        if finding.identifiable:
            assert finding.value == pytest.approx(TRUE[finding.name], rel=1e-6)
            assert found.profile.parameters.numbers[finding.name] == pytest.approx(TRUE[finding.name], rel=1e-5)


def test_what_the_measurements_do_not_tell_stays_and_says_what_would_tell_it() -> None:
    found = calibrated(made("sendrecv", noise=0.01, sizes=[2**power for power in range(30, 35)]))
    unknown = {finding.name: finding for finding in found.findings if not finding.identifiable}
    assert {"message_launch", "link_channel_rate", "nic_payload"} <= unknown.keys()
    for name, finding in unknown.items():
        assert finding.why
        assert finding.needs
        assert found.profile.parameters[name] == H100.parameters[name]


def test_constants_of_other_collectives_stay_as_they_were() -> None:
    """So a collective that was kept aside is predicted from nothing but what both have in common."""
    found = calibrated(made("sendrecv", noise=0.01, sizes=SIZES[::2]))
    told = candidates(H100, ["sendrecv"])
    for before, after in zip(H100.parameters.values(), found.profile.parameters.values(), strict=True):
        assert before == after or before.name in told
    assert not set(told) & {"ring_rate", "nic_ring_rate", "base_ll", "base_ll128", "base_simple"}


def test_several_sizes_of_a_family_are_fitted_together() -> None:
    """A second number of ranks tells hops from the latency of the call, which one alone does not."""
    sizes = [2**power for power in range(10, 22, 2)]
    cases = cases_of([table("all_gather", np.ones(6), sizes, size) for size in ("8", "4")], Choice(H100, ""))
    predict = Simulated(H100, cases)
    times_s = np.split(predict(changed(H100.parameters, {"base_ll": 9e-6, "link_hop_ll": 1.5e-6})), 2)
    both = [table("all_gather", times, sizes, size) for times, size in zip(times_s, ("8", "4"), strict=True)]
    known = {finding.name: finding for finding in calibrated(*both, names=["base_ll", "link_hop_ll"]).findings}
    assert known["link_hop_ll"].identifiable
    assert known["base_ll"].value == pytest.approx(9e-6, rel=1e-3)
    assert known["link_hop_ll"].value == pytest.approx(1.5e-6, rel=1e-3)
    alone = {finding.name: finding for finding in calibrated(both[0], names=["base_ll", "link_hop_ll"]).findings}
    assert "combination of it with 'base_ll'" in alone["link_hop_ll"].why


def simulated_anew(cases: Sequence[Case]) -> Callable[[Parameters], FloatArray]:
    """Predictions that build and simulate each row again, with the engine that `predict` takes."""

    def predict(parameters: Parameters) -> FloatArray:
        profile = H100.with_parameters(parameters)
        return np.array([simulated_row(profile, case, row) for case in cases for row in case.rows])

    def simulated_row(profile: Profile, case: Case, row: Row) -> float:
        machine = profile.machine(case.size, "machine")
        assert machine is not None
        return float(simulate(library_schedule(case.collective, machine.topology, row.size_bytes), machine).time_s)

    return predict


def test_predictions_are_those_of_a_simulation_from_scratch() -> None:
    """Also of constants that were tried before."""
    cases = cases_of([made("alltoall", sizes=SIZES[::5]), made("all_gather", sizes=SIZES[::5])], Choice(H100, ""))
    predict, anew = Simulated(H100, cases), simulated_anew(cases)
    for values in ({}, {"ring_rate": 1e9}, {"message_launch": 1e-3}, {"link_channel_rate": 1e9}, {}):
        parameters = changed(H100.parameters, values)
        assert predict(parameters) == pytest.approx(anew(parameters), rel=1e-9)


@pytest.mark.parametrize("name", profile_names())
def test_every_constant_that_can_be_fitted_has_a_measurement_that_tells_it(name: str) -> None:
    profile = load_profile(name)
    for constant in candidates(profile, ["all_gather", "sendrecv", "alltoall"]):
        assert CONSTANTS[constant].identified_by
        assert constant in profile.parameters


@given(st.sampled_from(sorted(CONSTANTS)), st.floats(1e-9, 1e15))
def test_a_constant_is_read_as_it_was_written(name: str, value: float) -> None:
    spec = CONSTANTS[name]
    if spec.unit in ("bytes/s", "s", "FLOP/s"):
        assert spec.parse(spec.format(value, 17)) == pytest.approx(value, rel=1e-12)
        assert spec.parse(spec.format(value)) == pytest.approx(value, rel=1e-5)


def test_a_log_becomes_a_profile_file_that_predicts_better(command: Command) -> None:
    (command.folder / "sendrecv.log").write_text(log(made("sendrecv", noise=0.01, sizes=SIZES[::2])))
    done = command("calibrate", "sendrecv.log", "--profile", "h100-8", "--output", "my.toml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["output"] == "my.toml"
    (of_table,) = found["tables"]
    assert of_table["mean_relative_error"] < 0.02 < of_table["mean_relative_error_before"]
    assert (of_table["profile"], of_table["rows"], of_table["ranks"]) == ("h100-8", 9, 8)
    profile = load_profile(str(command.folder / "my.toml"))
    machine = member(f"{command.folder / 'my.toml'}:1x8")
    assert machine is not None
    assert machine.topology.world_size == 8
    for each in found["constants"]:
        source = profile.parameters[each["name"]].source
        assert source == each["source"]
        if each["identifiable"]:
            assert source.startswith("fitted to sendrecv.log (9 rows, sendrecv), 95 % ")
            assert each["low"] < profile.parameters.numbers[each["name"]] < each["high"]


def test_the_file_of_a_profile_is_the_profile(tmp_path: Path) -> None:
    found = calibrated(made("sendrecv", sizes=SIZES[::3]))
    path = tmp_path / "my.toml"
    path.write_text(profile_document(found.profile))
    assert load_profile(str(path)) == found.profile


def test_measurements_faster_than_the_line_give_a_profile_that_can_be_read(tmp_path: Path) -> None:
    """A payload is part of a line rate, so no fit carries it further, however fast the measurements are."""
    measured_table = made("sendrecv", sizes=SIZES[::3])
    fast = table("sendrecv", [row.time_s / 2 for row in measured_table.rows], SIZES[::3])
    path = tmp_path / "fast.toml"
    path.write_text(profile_document(calibrated(fast).profile))
    assert load_profile(str(path)).parameters.numbers["link_payload"] <= H100.parameters.numbers["link_bandwidth"]


def test_a_profile_of_one_node_needs_no_network_to_be_calibrated() -> None:
    network = ("nic_bandwidth", "nic_latency")
    kept = [
        c for c in H100.parameters.values() if c.name not in network and CONSTANTS[c.name].depends_on not in network
    ]
    one_node = H100.with_parameters(Parameters(kept))
    cases = cases_of([made("all_gather", sizes=SIZES[::2])], Choice(one_node, ""))
    found = calibrate(one_node, cases, Simulated(one_node, cases), date="2026-01-15")
    assert found.profile.parameters.numbers["ring_rate"] == pytest.approx(TRUE["ring_rate"], rel=1e-3)


@given(st.sampled_from(sorted(CONSTANTS)), st.floats(1e-12, 1e18))
def test_a_clamped_value_is_within_the_limits_of_its_constant(name: str, value: float) -> None:
    """Clamping is idempotent, and a payload, a share and a hop keep their relation to what limits them."""
    spec = CONSTANTS[name]
    clamped = nearest_possible({**H100.parameters.numbers, name: value}).get(name, value)
    assert name not in nearest_possible({**H100.parameters.numbers, name: clamped})
    assert not spec.is_part or clamped <= H100.parameters.numbers[spec.depends_on]
    assert not spec.min_constant or clamped >= H100.parameters.numbers[spec.min_constant]
    if not (spec.is_part or spec.min_constant or spec.quantity.max_value < np.inf):
        assert clamped == value


def test_in_place_columns_and_two_runs_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "both.log"
    path.write_text(log(made("sendrecv", sizes=SIZES[::2])) + log(made("alltoall", sizes=SIZES[1::4])))
    found = calibrate_files(path, profile="h100-8").result
    assert [case.collective for case in found.cases] == ["sendrecv", "alltoall"]
    for name in ("link_payload", "link_many_payload", "message_launch"):
        assert found.profile.parameters.numbers[name] == pytest.approx(TRUE[name], rel=1e-3)
    in_place = cases_of(parse_nccl_tests(path.read_text(), str(path), in_place=True), Choice(H100, "8"))
    assert measured(in_place) == pytest.approx(2 * measured(found.cases), rel=1e-3)


def test_all_reduce_that_may_be_no_ring_is_left_out() -> None:
    notes: list[str] = []
    tables = [table("all_reduce", np.ones(len(SIZES)), size="2x8"), table("sendrecv", np.ones(len(SIZES)))]
    assert [case.collective for case in cases_of(tables, Choice(H100, ""), progress=notes.append)] == ["sendrecv"]
    assert "all-reduce" in notes[0]
    assert len(cases_of(tables, Choice(H100, ""), by_rings=True)) == 2


def test_all_reduce_inside_a_domain_is_what_nccl_chooses() -> None:
    tables = [table("all_reduce", np.ones(len(SIZES))), table("sendrecv", np.ones(len(SIZES)))]
    assert len(cases_of(tables, Choice(H100, ""))) == len(cases_of(tables, Choice(H100, ""), by_rings=True)) == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs ``tasp-lab calibrate`` and gives the one line with which it is refused."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["calibrate", *arguments])
        captured = capsys.readouterr()
        assert (left.value.code, captured.out, len(captured.err.splitlines())) == (2, "", 1), captured
        return captured.err

    return run


GOOD = log(made("sendrecv", sizes=SIZES[::3]))


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (log(made("sendrecv", sizes=SIZES[:3]), wrong=2), (), "2 wrong results"),
        (GOOD.replace(".", ","), (), "decimal point"),
        (GOOD.replace(" 32768 ", " 32KB "), (), "KiB counts in 1024"),
        (log(table("sendrecv", [0.0, 1.0], SIZES[:2])), (), "time '0.00'"),
        (log(table("sendrecv", [-1.0, 1.0], SIZES[:2])), (), "expected more than 0"),
        (log(made("sendrecv", sizes=SIZES[:1])), (), "1 row determines none, expected 5 or more"),
        (log(table("sendrecv", np.ones(18), size="16")), (), "16 ranks, but h100-8 has 8"),
        (GOOD[:300], (), "no measurement in it"),
        ("", (), "is empty"),
        (GOOD, ("--fit", "ring_rate"), "sendrecv on h100 may identify link_payload"),
        (GOOD, ("--fit", "nothing"), "constant 'nothing'"),
        (GOOD, ("--fit", "nic_payload"), "identify no constant"),
        (GOOD, ("--scale", "0.1"), "scale"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, text: str, options: tuple[str, ...], said: str, refused: Refused) -> None:
    (folder / "a.log").write_text(text)
    assert said in refused("a.log", "--profile", "h100-8", "--output", "my.toml", *options)
    assert [path.name for path in folder.iterdir()] == ["a.log"]


def test_broken_profiles_other_families_and_unnamed_machines_are_refused(folder: Path, refused: Refused) -> None:
    (folder / "a.log").write_text(GOOD)
    (folder / "a.csv").write_text("# profile: mi300x-8\n# collective: sendrecv\n# ranks: 8\nsize_B,time_us\n1,1\n")
    text = profile_document(H100)
    (folder / "field.toml").write_text(text.replace("inside =", "insides ="))
    (folder / "source.toml").write_text(re.sub("^source = .*$", "", text, count=1, flags=re.MULTILINE))
    assert "unknown field `insides`" in refused("a.log", "--profile", "field.toml")
    assert "required field `source`" in refused("a.log", "--profile", "source.toml")
    assert "'mi300x-8', expected one of the family 'h100'" in refused("a.csv", "--profile", "h100-8")
    assert "expected --profile" in refused("a.log", "a.csv")
    assert "would replace" in refused("field.toml", "--output", "field.toml")
    assert "ends in .toml" in refused("a.log", "--output", "my.json")
    assert "2 machines" in refused("full-mesh:2", "full-mesh:3", "--fabric", "emulated")
    assert "fit: " in refused("full-mesh:2", "--fabric", "emulated", "--fit", "ring_rate")
    assert "nothing to calibrate from" in refused()


def csv(table: MeasuredTable, profile: str) -> str:
    head = f"# profile: {profile}\n# collective: {table.collective}\n# ranks: {table.ranks}\n# algorithm: ring\n"
    return head + "size_B,time_us\n" + "".join(f"{row.size_bytes},{row.time_s * 1e6!r}\n" for row in table.rows)


def test_profiles_of_one_name_that_differ_are_two_machines(tmp_path: Path) -> None:
    for name, rate in (("all_gather", 300e9), ("reduce_scatter", 200e9)):
        (folder := tmp_path / name).mkdir()
        (folder / f"{name}.csv").write_text(csv(made(name, sizes=SIZES[::3]), "my.toml"))  # type: ignore[arg-type]
        (folder / "my.toml").write_text(
            profile_document(H100.with_parameters(changed(H100.parameters, {"ring_rate": rate})))
        )
    with pytest.raises(FitError, match=r"'my\.toml' differs from that of .*all_gather\.csv, expected one machine"):
        calibrate_files(tmp_path)


def pairs(kind: Kind, values: FloatArray) -> PairTable:
    return PairTable("pairs.log", kind, values)


@settings(max_examples=20)
@given(st.lists(st.floats(1e9, 46e9), min_size=12, max_size=12))
def test_pairs_tell_what_is_left_of_a_link(values: list[float]) -> None:
    """The median over pairs; of all at once, on a mesh that over links, on a switch that over ports."""
    matrix = np.full((4, 4), 1e12)
    matrix[~np.eye(4, dtype=bool)] = values
    mesh = load_profile("mi300x")
    (alone,) = pair_findings([pair_figure(pairs("unidirectional", matrix), mesh)], mesh)
    (together,) = pair_findings([pair_figure(pairs("all-to-all", matrix), mesh)], mesh)
    (ports,) = pair_findings([pair_figure(pairs("all-to-all", matrix), H100)], H100)
    assert (alone.name, together.name, ports.name) == ("link_payload", "link_many_payload", "link_many_payload")
    assert alone.value == together.value == pytest.approx(np.median(values))
    assert ports.value == pytest.approx(np.median(np.reshape(values, (4, 3)).sum(axis=1)))
    assert alone.low <= alone.value <= alone.high


def test_pairs_that_a_machine_cannot_have_are_refused() -> None:
    with pytest.raises(FitError, match=r"500GB/s between GPUs, but links of h100 carry 450GB/s"):
        pair_figure(pairs("unidirectional", np.full((2, 2), 500e9)), H100)
    with pytest.raises(FitError, match="9 GPUs, but a node of h100 has 8"):
        pair_figure(pairs("unidirectional", np.full((9, 9), 4e9)), H100)


def test_a_log_of_pairs_becomes_a_profile(command: Command) -> None:
    header = "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)"
    (command.folder / "p2p.log").write_text(
        f"{header}\n   D\\D     0      1 \n     0 2500.00 350.00 \n     1 352.00 2500.00 \n"
    )
    done = command("calibrate", "p2p.log", "--profile", "h100-8", "--output", "my.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert load_profile(str(command.folder / "my.toml")).parameters.numbers["link_payload"] == pytest.approx(351e9)
    (figure,) = json.loads(done.stdout)["pairs"]
    assert (figure["constant"], figure["count"]) == ("link_payload", 2)


@pytest.mark.parametrize("ending", [".json", ".toml"])
def test_a_machine_that_runs_becomes_a_machine_file(tmp_path: Path, ending: str) -> None:
    """The file has the links and the launch cost that were found; without a library only the links."""
    topology = switch(3, 1e9, 0.0)
    found = calibrate_pairs(topology, FakeRanks(topology, {2: 0.9}))
    machine = measured_machine(found, "on 2026-01-15")
    plain = topology_document(machine)
    path = tmp_path / f"my{ending}"
    path.write_bytes(msgspec.json.encode(plain) if ending == ".json" else msgspec.toml.encode(plain))
    loaded = load_machine(str(path))
    assert loaded.topology == found.machine.topology
    assert loaded.comm_library.launch_s == pytest.approx(LAUNCH_S)
    assert load_machine(str(path), library="ideal") == Machine(
        loaded.topology, IDEAL, loaded.compute, loaded.summary, loaded.parameters
    )
    plain["constants"] = [{"name": "launch", "value": "1us", "source": "twice"}] * 2
    path.write_bytes(msgspec.json.encode(plain) if ending == ".json" else msgspec.toml.encode(plain))
    with pytest.raises(TaspLabError, match="constant 'launch' occurs twice"):
        load_machine(str(path))


@pytest.mark.distributed
def test_ranks_that_run_are_calibrated(command: Command) -> None:
    done = command("calibrate", "full-mesh:2", "--fabric", "local", "--output", "my.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    machine = load_machine(str(command.folder / "my.json"))
    assert machine.comm_library.launch_s == pytest.approx(found["launch_s"], rel=1e-4)
    assert [each["pairs"] for each in found["calibration"]] == [[[0, 1], [1, 0]]]


def test_a_table_without_a_collective_says_so() -> None:
    incomplete = MeasuredTable("a.csv", {"profile": "h100-8"}, None, 8, (), "no header 'collective'")
    with pytest.raises(TableError, match=r"a\.csv: no header 'collective'"):
        cases_of([incomplete], Choice(H100, ""))
