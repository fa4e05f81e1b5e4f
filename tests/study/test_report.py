"""The report of a study: complete, self-contained, equal for equal studies; in a real browser it sorts and filters."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasp_lab.core.errors import MissingPackageError, OutputError
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.report import report
from tasp_lab.study.table import table
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
    return report(folder).html()


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


def test_the_answer_comes_first_and_the_command_last(html: str, folder: StudyFolder) -> None:
    text = " ".join(Resources(html).text)
    titles = ("Findings", "Pictures", "All points", "Without an answer", "Assumptions", "Constants",
              "Repeat")  # fmt: skip
    taken = Counter(each["recommended"] for each in table(folder).records())
    (most, count), total = taken.most_common(1)[0], sum(taken.values())
    assert f"Take {most} at {count} of {total} points" in text
    sections = re.findall(r"<h2>(.*?)</h2>", html)
    assert sections == list(titles)
    assert "one document per sequence" in text
    assert "tasp-lab study run longctx.toml --output longctx" in text
    assert ODD in text


def test_a_page_has_every_row_reason_and_constant(html: str) -> None:
    tables = data_of(html)["tables"]
    rows = list(study_rows())
    unanswered = [each for each in rows if each["status"] == "does not apply"]
    assert len(tables["points"]["rows"]) == len(rows) - len(unanswered)
    assert len(tables["unanswered"]["rows"]) == len(unanswered)
    assert [each[-1] for each in tables["unanswered"]["rows"]] == [each["error"] for each in unanswered]
    assert len(tables["winners"]["rows"]) == len(MACHINES) * len(MODELS) * len(SEQUENCES)
    sources = {(each[0], each[1]): each[-1] for each in tables["constants"]["rows"]}
    assert sources == {(each["machine"], each["name"]): each["source"] for each in CONSTANTS}
    times = {each["time_s"] for each in rows if each["status"] == "ok"}
    place = tables["points"]["columns"].index("time")
    bounds = {each["bound_s"] for each in rows if each["status"] == "settled"}
    assert {each[place][1] for each in tables["points"]["rows"]} == times | bounds


def test_plotly_knows_all_that_is_drawn(folder: StudyFolder) -> None:
    """Its Python package checks names and values of traces and layout."""
    import plotly.graph_objects as go

    for figure in report(folder).figures.values():
        for panel in figure["panels"]:
            go.Figure(data=panel, layout=figure["layout"])


def test_a_page_of_some_rows_says_which(folder: StudyFolder) -> None:
    where = "seq < 32Ki and machine == 'h100-8'"
    page = report(folder, where=where, baseline="tasp").html()
    assert f"Only rows where  {where}" in " ".join(Resources(page).text)
    assert len(data_of(page)["tables"]["points"]["rows"]) == 2 * len(MODELS) * 3
    assert "speed-ups over <b>tasp</b>" in page


def test_equal_studies_have_equal_pages(folder: StudyFolder, html: str) -> None:
    assert report(StudyFolder(folder.path)).html() == html


def test_a_study_of_one_point_or_without_numbers_has_no_pictures(tmp_path: Path) -> None:
    rows = [row(machine, "llama-3-8b", 8192, "tasp") for machine in MACHINES]
    for name, few in (("one", rows[:1]), ("machines", rows)):
        written = write_study(tmp_path / name, few, asked={}, constants=[], assumptions=[])
        page = report(StudyFolder(written)).html()
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
        report(folder).html()


def test_what_cannot_be_written_is_refused_and_leaves_nothing(folder: StudyFolder, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="its folder does not exist"):
        report(folder).write(tmp_path / "none" / "report.html")
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

    def times(self, order: str) -> list[float]:
        """The times of the table of winners after a click on their heading, in seconds."""
        heading = self.page.locator("#table-winners thead th", has_text=re.compile("^time$")).first
        heading.click()
        heading.and_(self.page.locator(f"th[aria-sort='{order}']")).wait_for()
        heads = self.page.locator("#table-winners thead tr:first-child th").all_inner_texts()
        cells = self.page.locator(f"#table-winners tbody td:nth-child({heads.index('time') + 1})").all_inner_texts()
        return [float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit] for number, unit in map(str.split, cells)]

    def shown(self, **filters: str) -> int:
        """How many rows the table of points says it has with these filters, which are removed again."""
        inputs = {self.page.locator(f"#table-points thead input[aria-label='filter {title.replace('_', ' ')}']"): text
                  for title, text in filters.items()}  # fmt: skip
        for field, text in inputs.items():
            field.fill(text)
        info = self.page.locator("#table-points_info").inner_text()
        for field in inputs:
            field.fill("")
        found = re.search(r"of ([\d,]+) rows", info)
        assert found, info
        return int(found[1].replace(",", ""))

    def hover(self, selector: str, **position: Any) -> str:
        """The text that appears where the pointer stops."""
        self.page.locator(selector).first.hover(force=True, **position)
        self.page.wait_for_selector(f"{selector.split()[0]} .hoverlayer .hovertext")
        return " ".join(self.page.locator(f"{selector.split()[0]} .hoverlayer .hovertext").all_text_contents())


def test_the_page_in_a_browser_without_a_network(html: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(html)
    with chromium() as browser:
        for size in (PHONE, WIDE):
            opened = Opened(browser.new_context(viewport=size, offline=True).new_page(), path)  # type: ignore[arg-type]
            page = opened.page
            assert opened.told == []
            assert [url for url in opened.asked if not url.startswith(("file:", "blob:"))] == []
            assert page.title().startswith("a study of <b>tags</b>")
            assert page.locator("h1").inner_text() == ODD
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            assert is_on_the_first_screen(page, ".summary", "#live-map svg", ".live-map .use")
            assert clipped(page) == []
        check_tables(opened)
        check_pictures(opened)
        assert opened.told == []


def is_on_the_first_screen(page: Page, *selectors: str) -> bool:
    boxes = [page.locator(each).first.bounding_box() for each in selectors]
    height = page.evaluate("innerHeight")
    return all(box is not None and box["y"] >= 0 and box["y"] + box["height"] <= height for box in boxes)


def clipped(page: Page) -> list[str]:
    """The table of winners, if a screen of this width does not show all of it; a phone scrolls it."""
    if page.evaluate("innerWidth") < 1000:
        return []
    wide = "(box) => box.scrollWidth > box.clientWidth + 1"
    boxes = page.locator(".dt-layout-table:has(#table-winners)")
    return [box.inner_text()[:40] for box in boxes.all() if box.evaluate(wide)]


def check_tables(opened: Opened) -> None:
    """A click on a heading sorts by value, as texts 10 s would come before 2 ms; filters leave what they say."""
    rows = [cells for cells in study_rows() if cells["status"] != "does not apply"]
    least: dict[tuple[str, str, int], float] = {}
    for cells in rows:
        key = cells["machine"], cells["model"], cells["seq"]
        least[key] = min(cells["time_s"] or math.inf, least.get(key, math.inf))
    shown = opened.times("ascending")
    assert shown == pytest.approx(sorted(least.values())[: len(shown)], rel=1e-3)
    assert opened.times("descending") == pytest.approx(sorted(least.values())[::-1][: len(shown)], rel=1e-3)

    def count(holds: Callable[[dict[str, Any]], bool]) -> int:
        return sum(map(holds, rows))

    assert opened.shown(schedule="ulys") == count(lambda cells: cells["schedule"] == "ulysses")
    assert opened.shown(length=">= 512Ki") == count(lambda cells: cells["seq"] >= 2**19)
    assert opened.shown(time="< 10 ms") == count(lambda cells: (cells["time_s"] or cells["bound_s"]) < 0.01)
    assert opened.shown(time="> 1 s", machine="MI300") == count(
        lambda cells: cells["machine"] == "mi300x-8" and (cells["time_s"] or cells["bound_s"]) > 1
    )
    assert opened.shown(decided_by="bound") == count(lambda cells: cells["status"] == "settled")
    assert opened.shown(model="no such model") == 0
    assert opened.shown() == len(rows)


def check_pictures(opened: Opened) -> None:
    """Points tell about themselves under the pointer, and choices show another panel."""
    page = opened.page
    machine, model = (page.locator(f"#choices-ratios select[data-axis='{place}']") for place in (0, 1))
    machine.select_option("h100-4x8")
    text = opened.hover("#figure-ratios .scatterlayer .points path")
    assert re.search(r"(zigzag-ring-attention|tasp|ulysses).*(ms|us|s) \(.* to .*\).*speed-up [\d.]+x", text), text
    machine.select_option("mi300x-8")
    model.select_option("llama-3-70b")
    lines: dict[str, list[float]] = {}
    for cells in study_rows():
        if (cells["machine"], cells["model"]) == ("mi300x-8", "llama-3-70b"):
            lines.setdefault(cells["schedule"], []).append(cells["time_s"] or cells["bound_s"])
    least = [min(times) for times in zip(*lines.values(), strict=True)]
    drawn = page.evaluate("document.getElementById('figure-ratios').data.map((each) => each.y)")
    for line, times in zip(drawn, lines.values(), strict=True):
        assert line == pytest.approx([time_s / best_s for time_s, best_s in zip(times, least, strict=True)])
