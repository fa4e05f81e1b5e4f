"""Layers beside their predictions: what a row is predicted as, which rows count, and which schedule is the fastest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.core.errors import TableError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import with_kernel
from tasp_lab.machines.host import HostModel
from tasp_lab.machines.stack import load_stack
from tasp_lab.measure.accuracy import MeasuredRow, TableAccuracy, evaluate, own_tables
from tasp_lab.measure.accuracy.layer import HOST_SHARE, LayerEvaluator
from tasp_lab.measure.accuracy.table_accuracy import TIE, ranking
from tasp_lab.measure.readers import LayerTable, find_all_tables, parse_any_table
from tasp_lab.prediction.inputs import with_host
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.workload.layer import Workload
from tests.conftest import Command

COLUMNS = (
    "system,variant,pass,mask,gpus,nodes,batch,seq_total,heads,kv_heads,head_dim,dtype,time_us,tflops_per_gpu,"
    "tokens_per_s_per_gpu,what"
)
RING = "ring-flash-attention"
HEAD = f"# profile: h100\n# source: a test\n{COLUMNS}\n"


def row(**changes: object) -> str:
    """A zigzag ring of a causal layer on eight GPUs, with some other cells."""
    cells: dict[str, object] = {
        "system": RING, "variant": "zigzag", "pass": "forward", "mask": "causal", "gpus": 8, "nodes": 1, "batch": 1,
        "seq_total": 65536, "heads": 8, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "time_us": 5000,
        "tflops_per_gpu": "", "tokens_per_s_per_gpu": "", "what": "",
    }  # fmt: skip
    return ",".join(str(cell) for cell in (cells | changes).values())


def evaluated(*rows: str, head: str = HEAD) -> TableAccuracy:
    return evaluate(parse_any_table(head + "\n".join(rows) + "\n", "t.csv"))


def predicted_s(
    schedule: str,
    options: AttentionOptions,
    machine: str = "h100-8",
    stack: str = "ring-flash-attn",
    **layer: object,
) -> float:
    """The sum of the passes by the event engine."""
    known = with_host(with_kernel(load_machine(machine), "flash-attention-2"), load_stack(stack).host(schedule))
    work = Workload(**{"sequence": 65536, "heads": 8, "head_dim": 128, "mask": "causal"} | layer)  # type: ignore[arg-type]
    schedules = build_schedules(schedule, known.topology, work, None, options)
    return sum(float(simulate(each, known, "simpy").time_s) for each in schedules)


@pytest.mark.parametrize("passing", ["forward", "backward", "forward+backward"])
def test_a_row_is_predicted_as_its_library_runs_it(passing: str) -> None:
    found = evaluated(row(**{"pass": passing, "time_us": 5000})).rows[0]
    passes = {"forward": "forward", "backward": "backward", "forward+backward": "both"}[passing]
    backward: dict[str, str] = {} if passing == "forward" else {"dataflow": "rotate-kv", "gradient_dtype": "fp32"}
    options = AttentionOptions(passes, trim=False, direction="descending", **backward)  # type: ignore[arg-type]
    expected = predicted_s("zigzag-ring-attention", options)
    assert found.predicted_s == pytest.approx(expected, rel=1e-9)
    assert found.relative_error == pytest.approx(expected / 5e-3 - 1)
    assert found.shape["schedule"] == "zigzag-ring-attention"
    assert found.in_scope


def test_the_member_of_a_family_follows_from_gpus_and_nodes() -> None:
    found = evaluated(row(gpus=16, nodes=2, seq_total=32768)).rows[0]
    options = AttentionOptions(trim=False, direction="descending")
    expected = predicted_s("zigzag-ring-attention", options, "h100-2x8", sequence=32768)
    assert found.predicted_s == pytest.approx(expected, rel=1e-9)


def test_a_rate_is_a_time_where_the_convention_is_stated() -> None:
    """65536 x 65537 / 2 pairs, 8 heads of 128, four FLOPs each, on 8 GPUs at 100 TFLOP/s."""
    pairs = 65536 * 65537 // 2
    for flops, counted in (("causal halved", pairs), ("causal full", 65536**2)):
        head = HEAD.replace("# source", f"# flops: {flops}\n# source")
        found = evaluated(row(time_us="", tflops_per_gpu=100), head=head).rows[0]
        assert found.measured_s == pytest.approx(4 * counted * 8 * 128 / (8 * 100e12))


def test_one_gpu_makes_one_kernel_call() -> None:
    found = evaluated(row(gpus=1, system="FlashAttention", variant="single GPU", seq_total=8192)).rows[0]
    expected = predicted_s("ring-attention", AttentionOptions(), "h100-1", "tasp-lab", sequence=8192)
    assert found.predicted_s == pytest.approx(expected, rel=1e-9)


def test_packings_are_averaged_and_scaled_to_the_sequence() -> None:
    packed = row(mask="varlen causal", variant="zigzag varlen")
    head = HEAD.replace("# source", "# documents: 4096 | 1024,3072\n# source")
    options = AttentionOptions(trim=False, direction="descending")
    expected = [
        predicted_s("zigzag-ring-attention", options, documents=lengths) for lengths in ((65536,), (16384, 49152))
    ]
    assert evaluated(packed, head=head).rows[0].predicted_s == pytest.approx(sum(expected) / 2, rel=1e-9)
    assert "no header 'documents'" in evaluated(packed).reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pass": "sideways"}, "unknown pass 'sideways'"),
        ({"pass": "training step"}, "a whole model, not one attention layer"),
        ({"system": "Abacus"}, "Abacus"),
        ({"variant": "spiral"}, "spiral"),
        ({"gpus": 10, "nodes": 4}, "10 GPUs on 4 nodes, expected a multiple of the nodes"),
        ({"gpus": 12, "nodes": 1}, "expected at most 8 ranks"),
        ({"mask": "diagonal"}, "unknown mask 'diagonal'"),
        ({"dtype": "fp7"}, "unknown dtype 'fp7'"),
        ({"dtype": "fp8"}, "dtype 'fp8': no kernel has constants of it"),
        ({"heads": 8, "kv_heads": 3}, "8 heads are not a multiple of 3 KV heads"),
        ({"gpus": ""}, "no gpus in the row"),
        ({"time_us": 0}, "a time of 0"),
        ({"time_us": ""}, "neither a time nor a rate"),
        ({"time_us": "", "tflops_per_gpu": 100}, "a rate without its convention: no header 'flops'"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_predicted_says_why_and_leaves_others(changes: dict[str, object], reason: str) -> None:
    found = evaluated(row(**changes), row())
    assert reason in found.rows[0].reason
    assert (found.rows[0].in_scope, found.rows[0].relative_error) == (False, None)
    assert found.in_scope
    assert len(found.errors) == 1
    alone = evaluated(row(**changes))
    assert reason in alone.reason
    assert not alone.in_scope


@pytest.mark.parametrize("cell", [{"time_us": -3}, {"gpus": "many"}, {"heads": -8}, {"time_us": "1,5"}])
def test_a_cell_that_is_no_number_is_one_line(cell: dict[str, object]) -> None:
    with pytest.raises(TableError, match=r"t\.csv, line 4: .*expected"):
        evaluated(row(**cell))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("h100", "hal-9000", "there is no profile 'hal-9000'"),
        ("# profile: h100\n", "", "no header 'profile'"),
        ("h100", "h100-4x8", "h100-4x8 has 32 ranks, the row 8 GPUs"),
        ("# source", "# out_of_scope: a broken cable\n# source", "a broken cable"),
        ("# source", "# from_seq_total: 131072\n# source", "shorter than 131072 positions"),
    ],
)
def test_headers_leave_tables_out(old: str, new: str, reason: str) -> None:
    found = evaluated(row(), head=HEAD.replace(old, new))
    assert reason in found.reason
    assert not found.in_scope


def test_a_member_as_the_profile_takes_rows_of_its_size() -> None:
    assert (
        evaluated(row(), head=HEAD.replace("h100", "h100-8")).rows[0].predicted_s
        == evaluated(row()).rows[0].predicted_s
    )


def test_host_bound_rows_are_predicted_but_do_not_count() -> None:
    head = HEAD.replace("# source", "# host_bound_below: 4096\n# source")
    found = evaluated(row(seq_total=2048, heads=8), row(), head=head)
    assert [each.regime for each in found.rows] == ["host-bound", "gpu-bound"]
    assert [each.in_scope for each in found.rows] == [False, True]
    assert found.rows[0].predicted_s is not None
    assert {name: len(errors) for name, errors in found.by_regime().items()} == {"host-bound": 1, "gpu-bound": 1}


def test_a_row_whose_host_takes_long_is_host_bound_without_a_header() -> None:
    """Eight steps of one short call each: the kernels take microseconds, the host some 200 us a step."""
    found = evaluated(row(seq_total=4096, heads=1, kv_heads=1), row())
    assert [each.regime for each in found.rows] == ["host-bound", "gpu-bound"]
    assert [each.in_scope for each in found.rows] == [False, True]
    assert "host that takes no time" in found.rows[0].reason


def test_rows_that_gave_host_times_never_count() -> None:
    """The sources of the host models name them: one head on 32 A800, causal, the five smallest of each schedule."""
    table = next(each for each in find_all_tables([own_tables() / "layers"]) if "a800_4x8_causal" in each.name)
    assert isinstance(table, LayerTable)
    sequences = sorted({each.sequence for each in table.rows if each.sequence and each.heads == 1})
    of_one_head = [each for each in table.rows if each.heads == 1 and each.sequence in sequences[:7]]
    found = evaluate(replace(table, rows=tuple(of_one_head)))
    longest = max(each.shape["seq_total"] for each in found.rows if not each.in_scope)  # type: ignore[type-var]
    assert not [each for each in found.rows if each.in_scope and each.shape["seq_total"] in sequences[:5]]
    assert longest in sequences[4:6]
    assert found.in_scope


def test_rows_of_other_host_models_are_other_rows() -> None:
    """TransformerEngine's ring and its Ulysses have host models of their own; so has what issues in no time."""
    evaluator = LayerEvaluator()
    table = parse_any_table(HEAD + row() + "\n", "t.csv")
    assert isinstance(table, LayerTable)
    evaluator.evaluate(table)
    names = {each.name for key in evaluator.known for each in key if isinstance(each, HostModel)}
    hosts = {each.is_instant for key in evaluator.known for each in key if isinstance(each, HostModel)}
    assert (names, hosts) == ({"ring-flash-attn/zigzag"}, {True, False})
    assert HOST_SHARE < 1


def test_equal_rows_are_simulated_once() -> None:
    evaluator, table = LayerEvaluator(), parse_any_table(HEAD + "\n".join([row(), row(time_us=9), row()]), "t.csv")
    assert isinstance(table, LayerTable)
    found = evaluator.evaluate(table)
    assert len(evaluator.known) == 2, "with the host and without"
    assert len({each.predicted_s for each in found.rows}) == 1


def work_rows(measured: Sequence[float], predicted: Sequence[float], work: str = "layer") -> list[MeasuredRow]:
    """A row per schedule of one work."""
    names = [f"schedule {number}" for number in range(len(measured))]
    pairs = zip(measured, predicted, names, strict=True)
    return [MeasuredRow(m, p, "", "gpu-bound", {}, (work,), name) for m, p, name in pairs]


times = st.lists(st.floats(0.1, 10), min_size=2, max_size=5)


@given(times, st.floats(0.1, 10))
def test_times_in_the_measured_order_are_right(measured: list[float], factor: float) -> None:
    right, groups = ranking(work_rows(measured, [factor * each for each in measured]))
    tied = max(measured) <= (1 + TIE) * min(measured)
    assert (right, groups) == ((None, 0) if tied else (1.0, 1))


@given(times)
def test_the_slowest_first_is_wrong(measured: list[float]) -> None:
    right, groups = ranking(work_rows(measured, [1 / each for each in measured]))
    assert right in (None, 0.0)
    assert groups == (right is not None)


def test_rankings_count_groups_that_are_no_ties_and_rows_that_count() -> None:
    tied = work_rows([1.0, 1.0 + TIE / 2], [2.0, 1.0], "tied")
    near = work_rows([1.0, 1.0 + TIE / 2, 3.0], [2.0, 1.0, 4.0], "two at the top")
    wrong = work_rows([1.0, 2.0], [2.0, 1.0], "wrong")
    left_out = [MeasuredRow(1.0, 9.0, "host-bound", "host-bound", {}, ("wrong",), "schedule 9")]
    assert ranking([*tied, *near, *wrong, *left_out]) == (0.5, 2)
    assert ranking(work_rows([1.0], [1.0])) == (None, 0)


def test_a_ranking_is_found_in_a_table() -> None:
    """Ring attention with a causal mask leaves ranks idle, so zigzag is faster by any model."""
    rows = [row(variant="ring", time_us=9000), row(variant="zigzag", time_us=5000)]
    assert evaluated(*rows).ranking == (1.0, 1)
    swapped = [row(variant="ring", time_us=5000), row(variant="zigzag", time_us=9000)]
    assert evaluated(*swapped).ranking[0] == 0.0
    other_machine = [row(variant="ring", time_us=5000), row(variant="zigzag", gpus=16, nodes=2)]
    assert evaluated(*other_machine).ranking[0] is None


def test_shares_of_rows_within_limits() -> None:
    time_s = evaluated(row()).rows[0].predicted_s
    assert time_s is not None
    rows = [row(time_us=time_s * 1e6 / (1 + error)) for error in (0.0, 0.04, -0.1, 0.3)]
    found = evaluated(*rows).to_dict()
    assert (found["kind"], found["within_5"], found["within_15"]) == ("layer", 0.5, 0.75)
    assert found["median_relative_error"] == pytest.approx(0.07, abs=1e-6)
    assert found["worst_relative_error"] == pytest.approx(0.3, abs=1e-6)


def test_every_table_of_layers_names_its_source_and_a_machine_or_why_not() -> None:
    tables = find_all_tables([own_tables() / "layers"])
    assert len(tables) > 40
    for table in tables:
        assert isinstance(table, LayerTable), table.name
        assert table.headers["source"], table.name
        assert table.profile or table.headers.get("out_of_scope"), table.name
        assert not table.reason, table.name


def test_the_command_tells_kinds_apart(command: Command, tmp_path: Path) -> None:
    (tmp_path / "layers.csv").write_text(HEAD + "\n".join([row(), row(system="Abacus")]) + "\n")
    (tmp_path / "kernels.csv").write_text(
        f"# flops: causal halved\n{KERNEL_HEAD}H100,flash_attention_2,fwd,bfloat16,1,2,16,16,128,8192,8192,,300\n"
    )
    found = {each["kind"]: each for each in json.loads(command("accuracy", str(tmp_path), "--json").stdout)["tables"]}
    assert set(found) == {"layer", "kernel"}
    layers, kernels = found["layer"], found["kernel"]
    assert [each["in_scope"] for each in layers["rows"]] == [True, False]
    first = layers["rows"][0]
    assert (first["schedule"], first["seq_total"], first["regime"]) == ("zigzag-ring-attention", 65536, "gpu-bound")
    assert (kernels["ranking_right"], kernels["rows"][0]["seq_q"]) == (None, 8192)
    shown = command("accuracy", str(tmp_path)).stdout
    assert "Abacus" in shown
    assert "tables of layers" in shown


@pytest.mark.parametrize("others", [["layers.csv"], ["layers.csv", "sends.csv"]])
def test_a_picture_of_layers_and_collectives(command: Command, others: list[str]) -> None:
    (command.folder / "layers.csv").write_text(HEAD + row() + "\n")
    (command.folder / "sends.csv").write_text(
        "# profile: h100-8\n# collective: sendrecv\n# ranks: 8\nsize_B,time_us\n1048576,90\n"
    )
    command("accuracy", *others, "--plot", "layers.svg")
    assert (command.folder / "layers.svg").read_text().count("<svg") == 1


KERNEL_HEAD = "gpu,kernel,pass,dtype,causal,batch,heads,kv_heads,head_dim,seq_q,seq_k,time_us,tflops\n"


def kernel_row(head: str, cells: str) -> MeasuredRow:
    return evaluate(parse_any_table(f"# flops: causal halved\n{head}{KERNEL_HEAD}{cells}\n", "k.csv")).rows[0]


@pytest.mark.parametrize(
    ("head", "cells", "reason"),
    [
        ("# profile: h100\n", "A100,flash_attention_2,fwd,bfloat16,1,2,16,16,128,8192,8192,900,", "not that of"),
        ("", "abacus,flash_attention_2,fwd,bfloat16,1,2,16,16,128,8192,8192,900,", "abacus"),
        ("", "H100,flash_attention_2,up,bfloat16,1,2,16,16,128,8192,8192,900,", "pass 'up'"),
        ("", "H100,flash_attention_2,fwd,int4,1,2,16,16,128,8192,8192,900,", "dtype 'int4'"),
        ("", "H100,flash_attention_2,fwd,bfloat16,1,2,16,3,128,8192,8192,900,", "KV heads"),
        ("", "H100,flash_attention_2,fwd,bfloat16,1,2,16,16,128,8192,8192,,", "neither"),
    ],
)
def test_a_kernel_that_is_not_predicted_says_why(head: str, cells: str, reason: str) -> None:
    found = kernel_row(head, cells)
    assert reason in found.reason
    assert not found.in_scope


def test_rates_of_kernels_count_what_the_mask_leaves() -> None:
    """At twice the keys a causal call of 4096 queries has 4096 x 8192 pairs less half a square of 4096."""
    for causal, pairs in ((0, 4096 * 8192), (1, 4096 * 8192 - 4096 * 4096 / 2)):
        found = kernel_row("", f"H100,flash_attention_2,bwd,float16,{causal},2,16,16,128,4096,8192,,250")
        assert found.measured_s == pytest.approx(10 * pairs * 2 * 16 * 128 / 250e12)


@pytest.mark.parametrize(("passing", "dtype"), [*product(["fwd", "bwd", "fwdbwd"], ["bfloat16", "float16"])])
def test_kernels_have_a_prediction_on_their_gpu(passing: str, dtype: str) -> None:
    found = kernel_row("", f"H100,flash_attention_2,{passing},{dtype},1,2,16,16,128,8192,8192,900,")
    assert found.in_scope
    assert found.predicted_s is not None
    assert found.predicted_s > 0
