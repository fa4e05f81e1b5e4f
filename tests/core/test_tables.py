"""Tables on a narrow console: columns are left out, and words stay whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.tables import Table, to_text

WORDS = st.text("abc", min_size=1, max_size=12)
CELLS = st.lists(WORDS, min_size=1, max_size=6).map(" ".join)
TABLES = st.integers(1, 6).flatmap(
    lambda columns: st.builds(
        Table,
        st.just("title"),
        st.lists(CELLS, min_size=columns, max_size=columns),
        st.lists(st.lists(CELLS, min_size=columns, max_size=columns), min_size=1, max_size=3),
        st.sets(st.integers(0, columns - 1)).map(sorted),
    )
)


@given(TABLES, st.integers(80, 200))
def test_lines_fit_and_words_are_whole(table: Table, width: int) -> None:
    """Every word of the shown columns is on a line, and a line has no other words."""
    lines = to_text([table], width).partition("\n--wide")[0].splitlines()
    shown = table.fitting(width)
    expected = {word for row in (table.columns, *table.rows) for place in shown for word in row[place].split()}
    assert max(map(len, lines)) <= width
    assert {word for line in lines[1:] for word in line.split() if word[0] in "abc"} == expected


def test_the_last_columns_are_left_out_first_and_named() -> None:
    numbers = ["1" * 20] * 5
    found = to_text([Table("times", ("a", "b", "c", "d", "e"), [numbers])], 80)
    assert found.splitlines()[-1] == "--wide also shows: d, e"
    assert "1" * 20 in found


def test_an_address_is_broken_after_a_slash() -> None:
    address = "https://example.org/" + "/".join(["part"] * 20)
    found = to_text([Table("sources", ("name", "source"), [("ring", address)], texts=(0, 1))], 60)
    cells = [line.split("│")[2].strip() for line in found.splitlines() if line.startswith("│")]
    assert "".join(cells) == address
    assert all(each.endswith("/") for each in cells[:-1])


def test_a_column_without_a_title_and_without_text_is_printed() -> None:
    assert "ring" in to_text([Table("times", ("name", ""), [("ring", "")])])
