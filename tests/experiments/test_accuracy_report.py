"""The step's curve obeys the laws of links; the report names all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.accuracy.report import families
from experiments.accuracy.step_curve import curve, draw_curves, measured_steps, predict_step
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.measure.accuracy import MeasuredRow, TableAccuracy, own_tables
from tasp_lab.measure.readers import parse_table, read_table

HEADERS = "# profile: h100-8\n# collective: sendrecv\n# ranks: 8\nsize_B,time_us\n"


@dataclass(frozen=True)
class Compared:
    """A table with these rows."""

    name: str
    rows: Sequence[MeasuredRow]

    def accuracy(self, reason: str = "") -> TableAccuracy:
        return TableAccuracy(parse_table(HEADERS + "1,1\n", f"{self.name}.csv"), reason, tuple(self.rows), "port")


class TestReport:
    def test_families_have_what_is_predicted(self) -> None:
        some, none = Compared("a", [MeasuredRow(1.0, 1.0, size_bytes=1)]).accuracy(), Compared("b", []).accuracy("none")
        assert families([some, none]) == {"h100": [some]}


class TestStepCurve:
    @settings(max_examples=25, deadline=None)
    @given(st.integers(2**20, 2**30))
    def test_two_messages_of_half_take_no_longer_than_one_after_the_other(self, size_bytes: int) -> None:
        machine = load_machine("h100-8")
        step, half = predict_step(machine, size_bytes), predict_step(machine, size_bytes // 2)
        assert half.ring_s < step.ring_of_two_s < 2 * half.ring_s

    def test_links_of_their_own_gain_at_most_their_number_and_ever_more(self) -> None:
        gains = [step.speed_up for step in curve(load_machine("mi300x-8"), 1)]
        assert gains == sorted(gains)
        assert 6.5 < gains[-1] < 7

    def test_behind_a_switch_a_step_takes_at_least_what_its_bytes_take_on_the_wire(self) -> None:
        machine, wires = load_machine("h100-8"), load_machine("h100-8", library="ideal")
        for step, bare in zip(curve(machine, 1), curve(wires, 1), strict=True):
            assert bare.ring_s < step.ring_s
            assert bare.tasp_s < step.tasp_s

    def test_measured_steps_lie_between_measured_sizes(self) -> None:
        times = dict(read_table(own_tables() / "h100_xxrjun_1x8_alltoall.csv").rows)
        for step in measured_steps():
            assert times[step.size_bytes] < step.tasp_s < times[2 * step.size_bytes]

    def test_the_picture_has_a_panel_per_machine(self) -> None:
        curves = {name: [predict_step(load_machine(name), 2**20)] for name in ("h100-8", "mi300x-8")}
        figure = draw_curves(curves, measured_steps())
        assert [axes.get_title(loc="left") for axes in figure.axes] == list(curves)


def test_the_report_names_pictures_that_are_there() -> None:
    folder = Path(__file__).parents[2] / "experiments" / "accuracy"
    text = (folder / "README.md").read_text()
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {name for name in pictures if name in text}
