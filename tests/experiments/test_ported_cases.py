"""Cases of other projects' tests: what they are, how they are said, and that ranks compute some of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.ported_cases.cases import BIAS, RANGES, SIDES, SINKS, WIDTH, Case, cases, known
from experiments.ported_cases.runs import RANKS, Run, _judged, drawn, exact, inputs, on_one_process, verdicts_of
from experiments.tables.ported_cases import page
from tests.support.selection import IS_FULL

SAID = [case for case in cases() if case.needs <= known()]
COUNTS = {"MagiAttention": 122, "Transformer Engine": 88, "LASP": 12, "flash-linear-attention": 70}


def rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables of a page, by their first cell."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {each[0].strip("[").partition("]")[0]: each[1:] for each in cells}


def case(**given: object) -> Case:
    """A small one."""
    values: dict[str, object] = {
        "project": "p", "source": "", "name": "n", "sequence": 12, "divide": 1, "heads": (2, 1), "head_dim": 4,
        "dtype": "fp32", "mask": "full",
    }  # fmt: skip
    return Case(**values | given)  # type: ignore[arg-type]


def seen(text: str) -> list[list[bool]]:
    return [[each == "x" for each in row] for row in text.split()]


def test_there_are_as_many_as_in_the_tests() -> None:
    assert {project: sum(each.project == project for each in cases()) for project in COUNTS} == COUNTS
    assert len({(each.project, each.name) for each in cases()}) == sum(COUNTS.values())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("full", "xxxx.. xxxx.. xxxx.. ...... ...... ......"),
        ("causal", "xx.... xxx... xxxx.. ...... ...... ......"),
        ("inverse-causal", "xxxx.. .xxx.. ..xx.. ...... ...... ......"),
        ("bi-causal", "xx.... .xx... ..xx.. ...... ...... ......"),
    ],
)
def test_ranges_are_aligned_at_their_last_or_first_corners(kind: str, expected: str) -> None:
    """Three queries and four keys: a causal range ends at the last of both, an inverse one begins at the first."""
    assert case(sequence=12, divide=2, ranges=(f"0:6/0:8/{kind}",)).seen.tolist() == seen(expected)


def test_windows_and_documents() -> None:
    assert case(sequence=4, window=(1, 2)).seen.tolist() == seen("xxx. xxxx .xxx ..xx")
    assert case(sequence=4, mask="causal", window=(1, 0)).seen.tolist() == seen("x... xx.. .xx. ..xx")
    assert case(sequence=5, documents=(2, 3), mask="causal").seen.tolist() == seen("x.... xx... ..x.. ..xx. ..xxx")


def test_no_query_of_a_cut_mask_is_without_keys_and_no_pair_is_in_two_ranges() -> None:
    for each in cases():
        if each.kind == "softmax":
            assert bool(each.seen.any(1).all()), each.name
        if each.ranges:
            alone = [replace(each, ranges=(row,)).seen.sum() for row in each.ranges]
            assert sum(alone) == each.seen.sum(), each.name


def test_layers_are_of_the_length_and_documents_that_are_run() -> None:
    for each in SAID:
        layer = each.workload
        assert layer.sequence == each.length == len(each.seen)
        assert sum(layer.documents or (each.length,)) == each.length


def test_what_is_missing_is_named() -> None:
    assert case(value_dim=8, bias="1hss", sinks=2).needs == {WIDTH, BIAS, SINKS}
    assert case(window=(3, 3)).needs == {SIDES}
    assert case(window=(3, 0), mask="causal").needs == frozenset()
    assert case(ranges=("0:12/0:12/full",)).needs == {RANGES}
    assert case(ranges=("0:12/0:12/full",), also="full").needs == frozenset()
    assert case(bias="1hss").says == "not to be said: additive bias"
    assert case(mask="causal", window=(3, 0)).says == "attention(q, k, v, causal=True, window=4)"


def test_runs_are_in_random_orders() -> None:
    runs = [drawn(each) for each in SAID]
    assert all(sorted(run.order) == list(range(len(run.order))) for run in runs)
    assert sum(list(run.order) == sorted(run.order) for run in runs) < len(runs) / 4
    assert {len(run.order) for run in runs} == set(RANKS)
    assert [drawn(each) for each in SAID] == runs


def test_one_process_is_near_the_exact_result_and_wrong_results_are_far() -> None:
    """A result that is off by 1 % fails, in either kind of layer and in each tensor."""
    for each in (case(value_dim=6, sinks=2, mask="causal"), case(kind="linear", mask="causal", states=True)):
        given = inputs(each)
        wanted = exact(each, given)
        single = {**wanted, **on_one_process(each, given, wanted)}
        run = Run(each, "ring-attention", (0,))
        assert _judged(run, [[single]]).has_passed
        for name in wanted:
            found = _judged(run, [[{**single, name: single[name] * 1.01}]])
            assert not found.has_passed
            assert found.tensor == name
        assert not _judged(run, [["rank 0: it failed"]]).has_passed
        assert not _judged(run, [[{**single, "out": single["out"] * torch.nan}]]).has_passed


def some() -> list[Run]:
    """For each project, decay and set of needs, the smallest case on 3 or 4 ranks; or every case."""
    runs = list(map(drawn, SAID))
    if IS_FULL:
        return runs
    few = [run for run in runs if len(run.order) <= 4]
    few.sort(key=lambda run: -run.case.batch * run.case.heads[0] * run.case.length**2)
    return list({(run.case.project, run.case.needs, run.case.decay): run for run in few}.values())


def test_ranks_compute_some_of_them() -> None:
    verdicts = list(verdicts_of(some()))
    assert [each for each in verdicts if not each.has_passed] == []
    found = rows(page(verdicts))
    for project, count in COUNTS.items():
        ran = sum(each.run.case.project == project for each in verdicts)
        said = sum(each.project == project for each in SAID)
        assert found[project][0] == str(count)
        assert found[project][2:5] == [str(said), str(ran), str(ran)]
