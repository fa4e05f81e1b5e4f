"""Studies as files and mappings: their points."""

from __future__ import annotations

import csv
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab import load_study, predict
from tasp_lab.core.errors import ProfileError, StudyError, TaspLabError
from tasp_lab.study.axis import value_of
from tasp_lab.study.check import check_study
from tasp_lab.study.point import AS_IS
from tasp_lab.study.run import run_study
from tasp_lab.study.store import RESULTS
from tasp_lab.workload.layer import Workload
from tests.conftest import ROOT
from tests.support.studies import SMALL, plans_of, study_of


@given(
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["ulysses", "tasp", "ring-attention"]), min_size=1, unique=True),
    st.integers(0, 2),
)
def test_points_are_all_combinations_each_once(
    ranks: list[int], lengths: list[int], names: list[str], variants: int
) -> None:
    what_if = {f"v{n}": {"set": {"link.bandwidth": f"x{n + 2}"}} for n in range(variants)}
    study = load_study(
        {
            "machine": {"name": "full-mesh:{n}", "n": ranks},
            "layer": {"seq": lengths},
            "schedule": {"name": names},
            "what-if": what_if,
        }
    )
    found = [(each.machine, each.layer.sequence, each.schedule, each.overrides) for each in study.points()]
    overrides = [(), *((f"link.bandwidth=x{n + 2}",) for n in range(variants))]
    wanted = itertools.product([f"full-mesh:{n}" for n in ranks], lengths, names, overrides)
    assert sorted(found) == sorted(wanted)
    assert study.count == len(found)


def test_a_filter_keeps_exactly_those_for_which_it_holds() -> None:
    study = load_study(study_of(where={"skip": "seq / ranks < 1Ki or n == 2 and seq > 4000"}))
    found = {(each.layer.sequence, each.label("n")) for each in study.points()}
    assert found == {
        (seq, n) for seq in (1024, 2048, 4096, 8192) for n in (2, 4) if seq / n >= 1024 and (n, seq > 4000) != (2, True)
    }


def test_axes_move_together() -> None:
    study = load_study(study_of(study={"zip": [["n", "heads"]]}, layer={"heads": [2, 8]}))
    assert {(each.machine, each.layer.heads) for each in study.points()} == {("full-mesh:2", 2), ("full-mesh:4", 8)}
    assert study.count == 2 * 4 * 3


def test_windows_are_an_axis_of_numbers_and_of_pairs() -> None:
    windows = [512, "1Ki", "2047,0", "-1,0"]
    points = list(load_study(study_of(layer={"window": windows, "seq": 8192})).points())
    assert {each.label("window"): each.layer.window for each in points} == dict(
        zip([512, 1024, *windows[2:]], [512, 1024, 2048, None], strict=True)
    )
    layers = {"window": ["7,9", "-1,4"], "mask": "full", "sinks": [True, False]}
    both = list(load_study(study_of(layer=layers)).points())
    assert {each.layer.window for each in both} == {(7, 9), (None, 4)}
    assert [value_of(each, "window") for each in (points[0], both[0])] == [512, None]
    assert len({each.key() for each in both}) == len(both)


def test_missing_parts_are_an_axis() -> None:
    machine = {"name": "full-mesh:{n}", "n": [4], "without": ["", "link.0-3", "gpu.1, link.0-3"]}
    points = list(load_study(study_of(machine=machine, where={"keep": "ranks == 4"})).points())
    assert {each.without for each in points} == {(), ("link.0-3",)}
    points = list(load_study(study_of(machine=machine)).points())
    assert {each.without for each in points} == {(), ("link.0-3",), ("gpu.1", "link.0-3")}
    assert len({each.key() for each in points}) == len(points)


def test_a_model_gives_its_layer() -> None:
    study = load_study(study_of(layer={"model": "llama-3-8b", "heads": 32}))
    layer = next(study.points()).layer
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.mask) == (32, 8, 128, "causal")


def test_a_file_and_a_mapping_are_one_study(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_bytes(tomli_w.dumps(SMALL).encode())
    one, two = load_study(file), load_study(SMALL)
    assert one == two
    assert list(one.points()) == list(two.points())
    assert one.variants[0] == (AS_IS, ())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layers": {}}, "unknown section 'layers', did you mean 'layer'?"),
    ({"machine": 3}, "[machine]: 3, expected a table"),
    (study_of(layer={"haeds": 4}), "[layer]: unknown name 'haeds', did you mean 'heads'?"),
    (study_of(machine={"librery": "nccl"}), "did you mean 'library'?"),
    (study_of(machine={"name": "full-mesh:{m}"}), "unknown name 'n'"),
    (study_of(machine={"name": ["full-mesh:{n}", "full-mesh:{m}"]}), "{m} in a name: no such axis"),
    (study_of(study={"zip": [["n", "seq"]]}), "axes of different lengths (n 2, seq 4)"),
    (study_of(study={"zip": [["n", "sq"]]}), "zip: no axis 'sq'"),
    (study_of(layer={"seq": [8, 8]}), "axis 'seq' has the value 8 twice"),
    (study_of(study={"zip": [["n", "seq"]]}, layer={"seq": [8, 8]}, machine={"n": [2, 2]}), "value (2, 8) twice"),
    (plans_of(layer={"heads": 4}), "[layer]: unknown name 'heads', expected one of model, seq"),
    (plans_of(machine={"runtime": "x"}), "[machine]: unknown name 'runtime', expected one of library, kernel"),
    (plans_of(plan={"simulation": 1}), "did you mean 'simulations'?"),
    (plans_of(schedule={"buffers": 3}), "[schedule]: unknown name 'buffers', expected one of name"),
    (plans_of(schedule={"name": "ulysses", "baseline": "ulysses"}), "[schedule] baseline in a study of plans"),
    (plans_of(find={"crossover": {"along": "seq"}}), "[find] in a study of plans, expected none"),
    (plans_of(study={"samples": 8}), "[study] samples in a study of plans, expected none"),
    ({"machine": {"name": "h100-8"}, "layer": {"seq": 8}, "plan": {"batch_tokens": 8}}, "[layer]: no model"),
    (
        {"machine": {"name": "h100-8"}, "layer": {"seq": 8, "model": "x"}, "plan": {"offload": True}},
        "[plan]: no batch_tokens",
    ),
    (study_of(study={"seed": -1}), "seed: -1"),
    (study_of(study={"nam": "x"}), "did you mean 'name'?"),
    (study_of(schedule={"baseline": "tasp"}), "baseline: unknown schedule 'tasp'"),
    (study_of(where={"skip": "sq < 3"}), "where: unknown name 'sq', did you mean 'seq'?"),
    (study_of(where={"kep": "seq > 3"}), "[where]: unknown name 'kep', did you mean 'keep'?"),
    (study_of(what_if={"as is": {"set": {"a": 1}}}), "a name other than 'as is'"),
    (study_of(what_if={"fast": {"link": "x2"}}), "[what-if.fast]: unknown name 'link'"),
    ({"machine": {"name": "h100-8"}, "schedule": {"name": "tasp"}}, "[layer]: no seq"),
    ({"layer": {"seq": 8}, "schedule": {"name": "tasp"}}, "[machine]: no name"),
    (study_of(find={"crosover": {}}), "did you mean 'crossover'?"),
]


@pytest.mark.parametrize(("document", "said"), BAD)
def test_a_bad_study_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(TaspLabError, match=re.escape(said)):
        load_study(document)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (study_of(machine={"name": "full-mesh:{n}x"}), "full-mesh:2x"),
        (study_of(layer={"seq": "soon"}), "seq: 'soon', expected a whole number"),
        (study_of(layer={"heads": 3.5}), "heads: 3.5, expected a whole number"),
        (study_of(layer={"kv_heads": 3}), "4 heads are not a multiple of 3 KV heads"),
        (study_of(layer={"model": "lama-3-8b"}), "did you mean 'llama-3-8b'"),
        (study_of(schedule={"buffers": 1}), "1 buffers, expected 2 or more"),
        (study_of(schedule={"name": "ulises", "baseline": "ulises"}), "did you mean 'ulysses'?"),
        (study_of(schedule={"name": ["ulysses"], "baseline": "ulysses", "stages": 8}), "no schedule of the study has"),
        (study_of(what_if={"fast": {"set": {"link.bandwith": "x2"}}}), "link.bandwidth"),
        (study_of(where={"skip": "seq > 0"}), "its filters skip all 24"),
        (study_of(machine={"contention": "maybe"}), "contention: 'maybe', expected 'on' or 'off'"),
        (study_of(machine={"kernel": 1}), "kernel: 1, expected a text such as 'flash-attention-3'"),
        (study_of(machine={"kernel": [1, 2]}), "kernel: 1, expected a text"),
        (study_of(machine={"stack": 1.5}), "stack: 1.5, expected a text"),
        (study_of(machine={"library": True}), "library 'True' is unknown: expected auto, nccl"),
        (study_of(layer={"layers": 3}), "layers: 3 of type int, expected a pattern such as LLSLLS"),
        (plans_of(layer={"model": "lama-3-8b"}), "did you mean 'llama-3-8b'"),
        (plans_of(plan={"checkpointing": "ful"}), "checkpointing: 'ful', expected one of none, selective, full"),
        (plans_of(plan={"offload": "yes"}), "offload: 'yes' of type str, expected true or false"),
        (plans_of(plan={"simulations": 0}), "simulations: 0, expected 1 or more"),
        (plans_of(plan={"matrix_dtype": "int8"}), "matrix dtype: 'int8', expected one of bf16, fp8"),
        (plans_of(plan={"logit_chunks": "a"}), "logit_chunks: 'a', expected a whole number"),
        (plans_of(schedule={"name": "ulises"}), "did you mean 'ulysses'?"),
    ],
)
def test_bad_points_are_refused_before_anything_runs(document: dict[str, Any], said: str) -> None:
    with pytest.raises(TaspLabError, match=re.escape(said)):
        check_study(load_study(document), estimate=False)


@pytest.mark.parametrize("given", [{"kernel": 1}, {"stack": 1.5}])
def test_a_run_refuses_what_is_no_name_and_keeps_nothing(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match="expected a text"):
        run_study(load_study(study_of(machine=given)), tmp_path)
    assert not (tmp_path / RESULTS).exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kernel": 1}, "kernel: 1 of type int, expected the name of a kernel"),
        ({"kernel": ["flash-attention-2"]}, "kernel: ['flash-attention-2'] of type list, expected the name"),
        ({"stack": 1.5}, "stack: 1.5 of type float, expected the name of a stack"),
    ],
)
def test_predict_refuses_what_is_no_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(said)):
        predict("h100-4", "ulysses", Workload(4096, heads=4, mask="full"), **given)


def test_a_study_is_counted_before_it_runs() -> None:
    found = check_study(load_study(study_of(what_if={"nic": {"set": {"link.bandwidth": "x2"}}})), estimate=False)
    assert found.to_dict() == {
        "study": "small", "combinations": 48, "points": 48, "questions": 48,
        "by_machine": {"full-mesh:2": 24, "full-mesh:4": 24}, "refused": {}, "estimate": None,
    }  # fmt: skip


def test_ten_million_points_are_not_expanded() -> None:
    study = load_study(study_of(layer={"batch": list(range(1, 1000)), "head_dim": list(range(1, 1000))}))
    assert study.count == 999 * 999 * 24
    with pytest.raises(StudyError, match="23,952,024 combinations, some 333 h"):
        check_study(study)


@pytest.mark.parametrize(
    "name", ["docs/studies.md", "experiments/studies/longctx.toml", "experiments/studies/long_context/study.toml"]
)
def test_studies_of_documents_are_valid(name: str) -> None:
    path = ROOT / name
    texts = [path.read_text()]
    if path.suffix == ".md":
        texts = [text for text in re.findall(r"```toml\n(.*?)```", texts[0], re.DOTALL) if "[schedule]" in text]
    assert texts
    for text in texts:
        found = check_study(load_study(tomllib.loads(text)), estimate=False)
        assert found.document["points"] > 100
        assert not found.document["refused"]


def test_the_page_of_a_thousand_gpus_has_the_times_of_its_rows() -> None:
    folder = ROOT / "experiments/studies/thousand_gpus"
    checked = check_study(load_study(folder / "study.toml"), estimate=False)
    with (folder / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert checked.document["points"] == len(rows) == 6
    assert not checked.document["refused"]
    times_ms: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda each: int(each["seq"])):
        times_ms.setdefault(row["schedule"], []).append(f"{1e3 * float(row['time_s']):.1f} ms")
    page = (folder / "README.md").read_text()
    for name, times in times_ms.items():
        assert f"| {name} | {' | '.join(times)} |" in page
