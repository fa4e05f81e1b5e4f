"""No module imports itself by way of others, imports in functions and for types included."""

from __future__ import annotations

from experiments.benchmarks.structure_counts import count_source
from tests.conftest import ROOT


def test_no_module_imports_itself_by_way_of_others() -> None:
    counts = count_source(ROOT, ("tasp_lab", "sim", "runtime"))
    assert (counts.cycles, counts.cycles_across_packages) == ([], [])
