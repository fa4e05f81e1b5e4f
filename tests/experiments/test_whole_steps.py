"""Published steps beside predictions: every row is predicted or says why not, and has a group with a cause."""

from __future__ import annotations

import csv
import json
from statistics import median

import pytest

from experiments.common import RESULTS
from experiments.tables.published_steps import FOLDER
from experiments.tables.whole_steps import GROUPS, groups_of, groups_table, layouts_of, regrets_of
from tasp_lab import load_model
from tasp_lab.prediction.interval import residual_interval
from tasp_lab.prediction.residuals import STEPS
from tasp_lab.workload.models.parameters import parameter_count

ROWS = json.loads((RESULTS / "whole_steps.json").read_text())["rows"]
TABLES = sorted(FOLDER.glob("*.csv"))


def lines_of(name: str) -> list[str]:
    return [line for line in (FOLDER / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_names_source_machine_and_software(path: object) -> None:
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]  # type: ignore[attr-defined]
    assert [line.split(":")[0] for line in head] == ["# source", "# machine", "# software", "# note"]


def test_every_published_row_has_a_place_in_the_result() -> None:
    published = [row for path in TABLES for row in csv.DictReader(lines_of(path.stem))]
    assert sorted((row["what"], row["variant"]) for row in published) == sorted(
        (row["what"], row["variant"]) for row in ROWS
    )


def test_rows_are_predicted_or_say_why_not() -> None:
    for row in ROWS:
        assert (row["predicted"] is None) == bool(row["reason"])
        if row["predicted"] is None:
            assert row["error"] is None
            continue
        measured_s, predicted_s = row["saved_s"] or (row["measured_s"], row["predicted"]["time_s"])
        assert row["error"] == pytest.approx(predicted_s / measured_s - 1)


def layout(variant: str, measured_s: float, predicted_s: float, **other: object) -> dict[str, object]:
    """A row of one model on 8 GPUs."""
    predicted = {"time_s": predicted_s, "tokens": 8, "matrix_dtype": "bf16"}
    row = {"source": "a", "what": "model", "gpus": 8, "positions": 4096, "variant": variant}
    return {**row, "measured_s": measured_s, "predicted": predicted, **other}


def test_regret_is_what_the_predicted_layout_takes_longer() -> None:
    """By measured times; per token where batches differ; of other GPUs and unpredicted ones do not count."""
    rows = [layout("tp", 2.0, 1.0), layout("cp", 1.0, 2.0), layout("alone", 9.0, 0.1, gpus=4)]
    unknown = [*rows, layout("unknown", 0.1, 0.1, predicted=None)]
    assert regrets_of(rows) == regrets_of(unknown) == [("model", 8, 2, "tp", "cp", 1.0)]
    larger = layout("dp", 3.0, 3.0, predicted={"time_s": 3.0, "tokens": 32, "matrix_dtype": "bf16"})
    assert regrets_of([*rows, larger]) == [("model", 8, 3, "dp", "dp", 0.0)]
    assert regrets_of([*rows, layout("tp, other kernels", 1.5, 1.0)]) == [
        ("model", 8, 2, "tp, other kernels", "cp", 0.5)
    ]


def test_the_page_has_the_regrets_and_the_groups_of_its_rows() -> None:
    page = (RESULTS / "whole_steps.md").read_text()
    assert all(part in page for part in [*layouts_of(ROWS), groups_table(ROWS)])


def test_each_predicted_row_is_in_one_group_whose_cause_the_guide_gives() -> None:
    groups = groups_of(ROWS)
    assert sum(map(len, groups.values())) == sum(row["error"] is not None for row in ROWS)
    guide = [line.split(" | ") for line in (RESULTS.parents[1] / "docs" / "whole_steps.md").read_text().splitlines()]
    stated = {cells[0].removeprefix("| "): cells[1] for cells in guide if len(cells) == 3}
    for name in GROUPS:
        assert stated[name] == f"{median(map(abs, groups[name])):.0%}".replace("%", " %")


def test_savings_are_those_on_one_gpu() -> None:
    """A constant part of the measured times, such as that of a VAE, cancels."""
    for row in ROWS:
        if row["saved_s"] is not None:
            (one,) = [each for each in ROWS if each["what"] == row["what"] and each["gpus"] == 1]
            assert row["saved_s"][0] == pytest.approx(one["measured_s"] - row["measured_s"])
            assert row["saved_s"][1] > 0


def test_predicted_peaks_are_within_the_published_ones() -> None:
    """What an allocator reserves is at least what is in use; on 8 to 256 GPUs without a pipeline most of it is.

    Without attention buffers: PyTorch passes gradients of keys around a ring, the schedule here holds those of all.
    """
    peaks = [(row["measured_bytes"], row["predicted"]) for row in ROWS if row["source"] == "torchtitan"]
    beside = [
        (published, each["memory_bytes"] - each["memory"]["attention_buffers"], each["pp"]) for published, each in peaks
    ]
    assert all(predicted <= published for published, predicted, _ in beside)
    shares = [predicted / published for published, predicted, stages in beside if stages == 1]
    assert len(shares) >= 12
    assert min(shares) > 0.7


def test_intervals_hold_rows_of_sources_that_are_left_out() -> None:
    rows = [(row["source"], 1 / (1 + row["error"])) for row in ROWS if row["error"] is not None]
    intervals = {source: residual_interval(1.0, STEPS, source) for source, _ in rows}
    inside = [intervals[source].low_s <= ratio <= intervals[source].high_s for source, ratio in rows]
    assert sum(inside) >= 0.8 * len(inside)


def test_transformers_of_diffusion_have_no_vocabulary_and_see_all_keys() -> None:
    """FLUX.1-dev has 12 B parameters and HunyuanVideo 13 B; without second streams and modulations fewer."""
    for name, published in (("flux-1-dev", 12e9), ("hunyuan-video", 13e9), ("cogvideox-5b", 5.6e9)):
        model = load_model(str(FOLDER / f"{name}.toml"))
        assert (model.vocabulary, model.mask) == (0, "full")
        assert 0.45 * published < parameter_count(model) <= published
