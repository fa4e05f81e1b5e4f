"""The report of a study: complete, self-contained, equal for equal studies; in a real browser it sorts and filters."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasp_lab.core.errors import MissingPackageError, OutputError
from tasp_lab.study.folder import StudyFolder
from tests.support.browser import chromium
from tests.support.study_folders import CONSTANTS, MACHINES, MODELS, SEQUENCES, row, study_rows, write_study

if TYPE_CHECKING:
    from playwright.sync_api import Page

ODD = "a study of <b>tags</b> & \"quotes\" </script><script>document.title = 'taken over'</script>"
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return StudyFolder(write_study(tmp_path_factory.mktemp("studies") / "longctx", study=ODD))


@pytest.fixture(scope="module")
def html(folder: StudyFolder) -> str:
    return folder.report().html()


class Resources(HTMLParser):
    """The addresses that a page loads, its links, and the text that people read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded, self.links, self.text = list[str](), list[str](), list[str]()
        self._is_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.loaded += [found[name] for name in ("src", "srcset", "data", "poster") if name in found]
        if "href" in found:
            (self.links if tag == "a" else self.loaded).append(found["href"])
        self._is_code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_code = False

    def handle_data(self, data: str) -> None:
        if not self._is_code:
            self.text.append(data)


def data_of(html: str) -> dict[str, Any]:
    """The data of the page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_a_page_loads_nothing(html: str) -> None:
    found = Resources(html)
    assert found.loaded == ["data:,"]
    assert [each for each in found.links if not each.startswith("#")] == []
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", styles)


def test_assumptions_come_first_and_the_command_last(html: str) -> None:
    text = " ".join(Resources(html).text)
    titles = ("Assumptions", "Findings", "Pictures", "All points", "Without an answer", "Constants",
              "How rows were settled", "Repeat")  # fmt: skip
    sections = re.findall(r"<h2>(.*?)</h2>", html)
    assert sections == list(titles)
    assert "one document per sequence" in text
    assert "h100-4x8 nic_channel_rate" in text
    assert "tasp-lab study run longctx.toml --output longctx" in text
    assert ODD in text


def test_a_page_has_every_row_reason_and_constant(html: str, tmp_path: Path) -> None:
    tables = data_of(html)["tables"]
    rows = list(study_rows())
    unanswered = [each for each in rows if each["status"] == "does not apply"]
    assert len(tables["points"]["rows"]) == len(rows) - len(unanswered)
    assert len(tables["unanswered"]["rows"]) == len(unanswered)
    assert tables["reasons"]["rows"] == [
        ["does not apply", unanswered[0]["error"], [str(len(unanswered)), len(unanswered)]]
    ]
    assert len(tables["winners"]["rows"]) == len(MACHINES) * len(MODELS) * len(SEQUENCES)
    sources = {(each[0], each[1]): each[-1] for each in tables["constants"]["rows"]}
    assert sources == {(each["machine"], each["name"]): each["source"] for each in CONSTANTS}
    times = {each["time_s"] for each in rows if each["status"] == "ok"}
    place = tables["points"]["columns"].index("time")
    bounds = {each["bound_s"] for each in rows if each["status"] == "settled"}
    assert {each[place][1] for each in tables["points"]["rows"]} == times | bounds
    winners = StudyFolder(write_study(tmp_path)).show().records()
    for name, fastest, clear, over, largest, _ in tables["scores"]["rows"]:
        own = [each for each in winners if each["winner"] == name]
        assert (fastest[1], clear[1]) == (len(own), sum(not each["too_close"] for each in own))
        assert over[1] == sum(each["speedup_low"] > 1 for each in own)
        assert largest[1] == max(each["speedup"] for each in own)
    settled = {each[0]: each[2][1] for each in tables["settled"]["rows"]}
    assert settled == {"simulation": 202, "bound": 6, "does not apply": 8}


def test_where_the_fastest_changes(html: str, tmp_path: Path) -> None:
    """Each change along the axis of numbers, found anew from the winners."""
    table = data_of(html)["tables"]["changes"]
    winners = StudyFolder(write_study(tmp_path)).show().records()
    expected = []
    for machine, model in itertools.product(MACHINES, MODELS):
        line = {each["seq"]: each for each in winners if (each["machine"], each["model"]) == (machine, model)}
        for low, high in itertools.pairwise(sorted(line)):
            if line[low]["winner"] != line[high]["winner"]:
                expected.append((machine, model, low, line[low]["winner"], high, line[high]["winner"]))
    assert expected
    assert table["columns"][-1] == "clear"
    of_line = [(each[0], each[1], each[2][1], each[3], each[5][1], each[6]) for each in table["rows"]]
    assert sorted(of_line) == sorted(expected)
    for each in table["rows"]:
        ends = [line for line in winners if line["machine"] == each[0] and line["model"] == each[1]]
        before, after = (next(line for line in ends if line["seq"] == value) for value in (each[2][1], each[5][1]))
        clear = each[6] not in before["too_close"], each[3] not in after["too_close"]
        assert (each[-1] in ("at both ends", "before"), each[-1] in ("at both ends", "after")) == clear


def test_plotly_knows_all_that_is_drawn(folder: StudyFolder) -> None:
    """Its Python package checks names and values of traces and layout."""
    import plotly.graph_objects as go

    for figure in folder.report().figures:
        for panel in figure.panels:
            go.Figure(data=panel, layout=figure.layout)


def test_a_page_of_some_rows_says_which(folder: StudyFolder) -> None:
    where = "seq < 32Ki and machine == 'h100-8'"
    page = folder.report(where=where, baseline="tasp").html()
    assert f"Only rows where  {where}" in " ".join(Resources(page).text)
    assert len(data_of(page)["tables"]["points"]["rows"]) == 2 * len(MODELS) * 3
    assert "speed-up over tasp" in page


def test_equal_studies_have_equal_pages(folder: StudyFolder, html: str) -> None:
    assert StudyFolder(folder.path).report().html() == html


def test_a_study_of_one_point_or_without_numbers_has_no_pictures(tmp_path: Path) -> None:
    rows = [row(machine, "llama-3-8b", 8192, "tasp") for machine in MACHINES]
    for name, few in (("one", rows[:1]), ("machines", rows)):
        page = StudyFolder(write_study(tmp_path / name, few, asked={}, constants=[], assumptions=[])).report().html()
        assert data_of(page)["figures"] == {}
        assert "Every point has an answer." in page


@pytest.mark.parametrize("missing", ["jinja2", "itables", "plotly"])
def test_a_missing_package_names_the_extra(folder: StudyFolder, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        MissingPackageError, match=rf"a report needs {missing}, expected: pip install 'tasp-lab\[studies\]'"
    ):
        folder.report().html()


def test_what_cannot_be_written_is_refused_and_leaves_nothing(folder: StudyFolder, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="its folder does not exist"):
        folder.report().write(tmp_path / "none" / "report.html")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ in a browser


class Opened:
    """A page in a browser, with all that it asked for and said."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page, self.told, self.asked = page, list[str](), list[str]()
        page.on("console", lambda message: self.told.append(message.text))
        page.on("pageerror", lambda error: self.told.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-tables=ready]")

    def column(self, table: str, title: str) -> list[str]:
        """The texts of a column of the rows that are shown."""
        heads = self.page.locator(f"#table-{table} thead tr:first-child th").all_inner_texts()
        return self.page.locator(f"#table-{table} tbody td:nth-child({heads.index(title) + 1})").all_inner_texts()

    def sort(self, table: str, title: str, order: str) -> None:
        """Click on a heading and wait until the table, which sorts when the click is over, says that it is sorted."""
        heading = self.page.locator(f"#table-{table} thead th", has_text=re.compile(f"^{re.escape(title)}$")).first
        heading.click()
        heading.and_(self.page.locator(f"th[aria-sort='{order}']")).wait_for()

    def filter(self, table: str, title: str, text: str) -> None:
        self.page.locator(f"#table-{table} thead input[aria-label='filter {title}']").fill(text)

    def shown(self, table: str) -> int:
        """How many rows a table says it has."""
        info = self.page.locator(f"#table-{table}_info").inner_text()
        found = re.search(r"of ([\d,]+) rows", info)
        assert found, info
        return int(found[1].replace(",", ""))

    def hover(self, selector: str) -> str:
        """The text that appears where the pointer stops."""
        self.page.locator(selector).first.hover(force=True)
        self.page.wait_for_selector(".hoverlayer .hovertext")
        return " ".join(self.page.locator(".hoverlayer .hovertext").all_text_contents())


@pytest.fixture(scope="module")
def opened(folder: StudyFolder, html: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Opened]]:
    """The page on a wide screen and on a phone, without a network."""
    path = tmp_path_factory.mktemp("reports") / "report.html"
    path.write_text(html)
    with chromium() as browser:
        sizes = {"wide": WIDE, "phone": PHONE}
        yield {
            name: Opened(browser.new_context(viewport=size, offline=True).new_page(), path)  # type: ignore[arg-type]
            for name, size in sizes.items()
        }


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def seconds(text: str) -> float:
    number, unit = text.removeprefix("> ").split()
    return float(number) * SECONDS[unit]


def test_a_browser_finds_no_fault_and_asks_for_nothing(opened: dict[str, Opened], tmp_path: Path) -> None:
    for name, each in opened.items():
        each.page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
        assert each.told == []
        assert [url for url in each.asked if not url.startswith(("file:", "blob:"))] == []
        assert each.page.title().startswith("a study of <b>tags</b>")
        assert each.page.locator("h1").inner_text() == ODD
        width = each.page.evaluate("document.documentElement.scrollWidth")
        assert width <= each.page.viewport_size["width"]  # type: ignore[index]
        assert (tmp_path / f"{name}.png").stat().st_size > 50_000


def test_a_click_on_a_heading_sorts_by_value(opened: dict[str, Opened]) -> None:
    """As texts 10 s would come before 2 ms."""
    page = opened["wide"]
    page.sort("winners", "time", "ascending")
    shown = [seconds(each) for each in page.column("winners", "time")]
    winners = sorted(min_times().values())
    assert shown == pytest.approx(winners[: len(shown)], rel=1e-3)
    page.sort("winners", "time", "descending")
    shown = [seconds(each) for each in page.column("winners", "time")]
    assert shown == pytest.approx(winners[::-1][: len(shown)], rel=1e-3)


def min_times() -> dict[tuple[str, str, int], float]:
    """The shortest time of each question."""
    found: dict[tuple[str, str, int], float] = {}
    for each in study_rows():
        if each["status"] == "ok":
            key = each["machine"], each["model"], each["seq"]
            found[key] = min(each["time_s"], found.get(key, each["time_s"]))
    return found


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        ({"schedule": "ulys"}, lambda each: each["schedule"] == "ulysses"),
        ({"length": ">= 512Ki"}, lambda each: each["seq"] >= 2**19),
        ({"time": "< 10 ms"}, lambda each: (each["time_s"] or each["bound_s"]) < 0.01),
        ({"time": "> 1 s", "machine": "MI300"}, lambda each: each["machine"] == "mi300x-8"
            and (each["time_s"] or each["bound_s"]) > 1),
        ({"settled by": "bound"}, lambda each: each["status"] == "settled"),
        ({"model": "no such model"}, lambda each: False),
    ],
)  # fmt: skip
def test_filters_leave_what_they_say(opened: dict[str, Opened], filters: dict[str, str], holds: Any) -> None:
    page = opened["wide"]
    for title, text in filters.items():
        page.filter("points", title, text)
    expected = sum(holds(each) for each in study_rows() if each["status"] != "does not apply")
    assert page.shown("points") == expected
    for title in filters:
        page.filter("points", title, "")
    assert page.shown("points") == 208


def test_points_tell_about_themselves_under_the_pointer(opened: dict[str, Opened], tmp_path: Path) -> None:
    page = opened["wide"]
    page.page.locator("#choices-curves select").first.select_option("h100-4x8")
    told = page.hover("#figure-curves .scatterlayer .points path")
    page.page.screenshot(path=tmp_path / "hover.png")
    assert re.search(r"(zigzag-ring-attention|tasp|ulysses).*(ms|us|s) \(.* to .*\).*speed-up [\d.]+x", told), told


def test_a_map_tells_who_wins_under_the_pointer(opened: dict[str, Opened]) -> None:
    page = opened["wide"]
    page.page.locator("#figure-map .nsewdrag").hover(position={"x": 5, "y": 5})
    page.page.wait_for_selector("#figure-map .hoverlayer .hovertext")
    told = " ".join(page.page.locator("#figure-map .hoverlayer .hovertext").all_text_contents())
    assert "zigzag-ring-attention" in told
    assert "then tasp" in told


def test_a_choice_shows_another_panel(opened: dict[str, Opened]) -> None:
    page = opened["wide"].page
    shown = "document.getElementById('figure-curves').data.map((each) => each.y)"
    machine, model = (page.locator(f"#choices-curves select[data-axis='{place}']") for place in (0, 1))
    machine.select_option("h100-8")
    before = page.evaluate(shown)
    machine.select_option("mi300x-8")
    model.select_option("llama-3-70b")
    rows = [each for each in study_rows() if (each["machine"], each["model"]) == ("mi300x-8", "llama-3-70b")]
    lines: dict[str, list[float]] = {each["schedule"]: [] for each in rows}
    for each in rows:
        lines[each["schedule"]].append(each["time_s"] or each["bound_s"])
    after = page.evaluate(shown)
    assert after != before
    assert [after[place] for place in (3, 7, 11)] == list(lines.values())
