"""The live map: its arrays are the rows, between them it interpolates, and in a browser it takes what Python takes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from tasp_lab.prediction.interval import DECIDED
from tasp_lab.study.file import load_study
from tasp_lab.study.frames import winners
from tasp_lab.study.live_map import interpolation_error, live_map, map_library, map_script
from tasp_lab.study.run import run_study
from tests.conftest import ROOT, Tell
from tests.support.browser import chromium
from tests.support.study_folders import row

if TYPE_CHECKING:
    from playwright.sync_api import Page

COLORS = {"tasp": "#4477aa", "zigzag-ring-attention": "#ee6677", "ulysses": "#228833"}
SEQUENCES, NICS = (8192, 16384, 32768, 65536), (0.5, 1.0, 2.0)
POWERS = {"tasp": (1.2e-3, 1.0, 0.9), "zigzag-ring-attention": (1e-3, 1.5, 0.2), "ulysses": (1.1e-3, 1.3, 0.1)}
"""Time at the least length, and the powers of length and of the bandwidth's inverse."""


def power_s(schedule: str, seq: float, nic: float) -> float:
    factor, of_seq, of_nic = POWERS[schedule]
    return factor * (seq / SEQUENCES[0]) ** of_seq * nic**-of_nic


def power_rows() -> pd.DataFrame:
    """Times that are powers of length and bandwidth, which interpolation in logarithms has exactly."""
    found = []
    for seq in SEQUENCES:
        for nic in NICS:
            for schedule in POWERS:
                time_s = power_s(schedule, seq, nic)
                changed = {"variant": f"nic {nic:g}", "overrides": "" if nic == 1 else f"nic.bandwidth=x{nic:g}"}
                cells = {"time_s": time_s, "exposed_s": 0.3 * time_s, "compute_s": 0.7 * time_s}
                found.append(row("h100-4x8", "llama-3-8b", seq, schedule, **changed, **cells))
    return pd.DataFrame(found)


def test_the_error_of_powers_is_none_and_that_of_a_square_is_known() -> None:
    axis = {"values": [1, 2, 4, 8, 16], "between": True}
    steps = np.arange(5.0)
    assert interpolation_error(3 * steps[:, None], [axis])["median"] < 1e-12  # type: ignore[index]
    found = interpolation_error(steps[:, None] ** 2, [axis])
    # between (s - 1)^2 and (s + 1)^2 lies s^2 + 1
    assert found is not None
    assert found["median"] == pytest.approx(math.e - 1)
    assert found["times"] == 2
    assert interpolation_error(steps[:, None], [axis | {"between": False}]) is None


def test_axes_that_interpolation_misses_are_not_interpolated() -> None:
    rows = power_rows()
    assert [axis["between"] for axis in live_map(rows, COLORS)["axes"]] == [True, True]  # type: ignore[index]
    rows["time_s"] *= [3.0 if seq in SEQUENCES[1::2] else 1.0 for seq in rows["seq"]]
    assert [axis["between"] for axis in live_map(rows, COLORS)["axes"]] == [False, False]  # type: ignore[index]


class Opened:
    """A page with a map alone."""

    def __init__(self, page: Page, folder: Path, grid: dict[str, Any], address: str = "") -> None:
        self.page, self.problems = page, list[str]()
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        path = folder / "map.html"
        scripts = "".join(f"<script>{each}</script>" for each in (map_library(), map_script(grid)))
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        )
        path.write_text(f'<!DOCTYPE html>{head}<div id="live-map"></div>{scripts}')
        page.goto(path.as_uri() + address)
        page.wait_for_selector("#live-map svg rect")

    def slide(self, name: str, position: float) -> None:
        self.page.locator(f"input[data-axis='{name}']").fill(str(position))

    def taken(self) -> str:
        return self.page.locator("#live-map .use b").inner_text()

    def times(self) -> dict[str, float]:
        cells = self.page.locator("#live-map tr:has(td)").all()
        rows = [line.locator("td").all_inner_texts() for line in cells]
        units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
        return {name: float(text.split()[0]) * units[text.split()[1]] for name, text, *_ in rows}


def test_the_map_takes_what_python_takes_and_interpolates_between(tmp_path: Path) -> None:
    rows = power_rows()
    grid = live_map(rows, COLORS)
    assert grid is not None
    expected = {(each.seq, float(each.variant.split()[1])): each for each in winners(rows).itertuples()}
    assert len({each.recommended for each in expected.values()}) > 1
    with chromium() as browser:
        opened = Opened(browser.new_context(offline=True).new_page(), tmp_path, grid)
        for place, seq in enumerate(SEQUENCES):
            opened.slide("seq", place)
            for number, nic in enumerate(NICS):
                opened.slide("nic.bandwidth", number)
                assert opened.taken() == expected[seq, nic].recommended
                text = opened.page.locator("#live-map .sure").inner_text()
                assert text.startswith("Unsure") == (expected[seq, nic].expected_regret > DECIDED)
        opened.slide("seq", 1.5)
        opened.slide("nic.bandwidth", 0.25)
        seq, nic = SEQUENCES[1] * 2**0.5, NICS[0] * 2**0.25
        # times have four digits on the page
        assert opened.times() == pytest.approx({name: power_s(name, seq, nic) for name in POWERS}, rel=1e-3)
        assert opened.problems == []


def test_the_keyboard_moves_the_point_and_the_address_keeps_it(tmp_path: Path) -> None:
    grid = live_map(power_rows(), COLORS)
    assert grid is not None
    with chromium() as browser:
        page = browser.new_context(offline=True, viewport={"width": 400, "height": 800}).new_page()
        opened = Opened(page, tmp_path, grid)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        for control in page.locator("#live-map input, #live-map select").all():
            assert control.evaluate("(box) => box.closest('label').textContent.trim().length") > 0
        picture = page.locator("#live-map svg")
        picture.focus()
        before = picture.get_attribute("aria-label")
        for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
            page.keyboard.press(key)
        assert picture.get_attribute("aria-label") != before
        page.keyboard.press("ArrowLeft")
        told, times = page.locator("#live-map .command code").inner_text(), opened.times()
        address = page.evaluate("location.hash")
        assert address.startswith("#map&seq=")
        again = Opened(browser.new_context(offline=True).new_page(), tmp_path, grid, address)
        assert again.page.locator("#live-map .command code").inner_text() == told
        assert again.times() == times
        assert opened.problems + again.problems == []


def test_the_command_of_a_point_predicts_its_times(tmp_path: Path, tell: Tell) -> None:
    study = {
        "machine": {"name": "h100-8"},
        "layer": {"seq": [8192, 16384], "heads": 16, "kv_heads": 8, "mask": "causal"},
        "schedule": {"name": ["ulysses", "tasp"]},
        "what-if": {"fast": {"set": {"link.bandwidth": "x1.5"}}},
    }
    rows = run_study(load_study(study)).to_pandas()
    grid = live_map(rows, COLORS)
    assert grid is not None
    with chromium() as browser:
        page = browser.new_context(offline=True).new_page()
        Opened(page, tmp_path, grid, "#map&seq=16384&link.bandwidth=1.5")
        line = page.locator("#live-map .command code").inner_text().split()
    assert line[:2] == ["tasp-lab", "compare"]
    code, out, _ = tell(*line[1:], "--schedule", "ulysses", "--schedule", "tasp", "--json")
    assert code == 0
    answers = json.loads(out)["results"]
    chosen = rows[(rows["seq"] == 16384) & (rows["variant"] == "fast")]
    expected = dict(zip(chosen["schedule"], chosen["time_s"], strict=True))
    assert {each["schedule"]: each["time_s"] for each in answers} == pytest.approx(expected)


def test_the_map_of_the_documents_is_small_and_close() -> None:
    """Half of the predictions that it was not made from are within 2 % of what it interpolates."""
    text = (ROOT / "experiments/studies/live_map/grid.js").read_text()
    assert len(text) + len(map_library()) < 1_000_000
    found = re.search(r'"error":(\{.*?\})', text)
    assert found
    error = json.loads(found[1])
    assert error["median"] <= 0.02
    assert error["times"] > 100
    assert error["where"] == "between the points of the grid"
