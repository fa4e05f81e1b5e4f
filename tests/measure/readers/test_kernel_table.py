"""Tables of kernels: conventions, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasp_lab.core.errors import TableError
from tasp_lab.machines.kernel_model.catalogue import gpu_alias, kernel_alias
from tasp_lab.measure.readers.file_position import parse_csv
from tasp_lab.measure.readers.kernel_table import is_kernel_table, kernel_table, read_kernel_table

OWN = Path(__file__).parents[3] / "tasp_lab" / "measure" / "tables" / "kernels"
HEAD = "gpu,kernel,pass,dtype,causal,batch,heads,kv_heads,head_dim,seq_q,seq_k,time_us,tflops\n"


def row_of(line: str, headers: str = "") -> tuple[float, int]:
    table = kernel_table(parse_csv(headers + HEAD + line, "t.csv"))
    return table.rows[0].measured_s, table.rows[0].flops


def test_every_table_of_ours_is_read_and_names_its_source() -> None:
    for path in sorted(OWN.glob("*.csv")):
        table = read_kernel_table(path)
        assert table.headers["source"]
        assert table.rows
        assert all(row.measured_s > 0 and row.flops > 0 for row in table.rows)


def test_rates_count_pairs_inside_the_mask() -> None:
    """4 x 128 FLOPs per pair: 4096 x 4096 pairs without mask, half of them causal, at 100 TFLOP/s."""
    full_s, _ = row_of("H100,fa3,fwd,bf16,0,1,1,1,128,4096,4096,,100")
    assert full_s == pytest.approx(512 * 4096**2 / 1e14)
    assert row_of("H100,fa3,fwd,bf16,1,1,1,1,128,4096,4096,,100", "# flops: causal halved\n")[0] == pytest.approx(
        full_s / 2
    )
    assert row_of("H100,fa3,fwd,bf16,1,1,1,1,128,4096,4096,,100", "# flops: causal full\n")[0] == pytest.approx(full_s)
    assert row_of("H100,fa3,bwd,bf16,0,1,1,1,128,4096,4096,,100")[0] == pytest.approx(2.5 * full_s)
    assert row_of("H100,fa3,fwdbwd,bf16,0,1,1,1,128,4096,4096,,100")[0] == pytest.approx(3.5 * full_s)


@pytest.mark.parametrize(("short", "long"), [("fwd", "forward"), ("bwd", "backward"), ("fwdbwd", "forward+backward")])
def test_passes_have_the_names_of_tables_of_layers_too(short: str, long: str) -> None:
    one, two = (row_of(f"H100,fa3,{passing},bf16,0,1,1,1,128,64,64,3,") for passing in (short, long))
    assert one == two


def test_a_causal_mask_ends_at_the_bottom_right() -> None:
    """2 queries of 5 keys: the first sees 4, the last all 5."""
    _, flops = row_of("H100,fa3,fwd,bf16,1,1,1,1,64,2,5,1,")
    assert flops == 4 * 64 * 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "H100,fa3,fwd,bf16,0,1,1,1,128,64,64,-3,", "t.csv, line 2: time '-3', expected more than 0"),
        (HEAD + "H100,fa3,fwd,bf16,0,1,1,1,128,64,64,,", "t.csv, line 2: neither time_us nor tflops"),
        (HEAD + "H100,fa3,up,bf16,0,1,1,1,128,64,64,3,", "t.csv, line 2: pass 'up', expected one of fwd"),
        (HEAD + "H100,fa3,fwd,bf16,0,1,6,4,128,64,64,3,", "t.csv, line 2: 6 heads on 4 KV heads"),
        (HEAD + "H100,,fwd,bf16,0,1,1,1,128,64,64,3,", "t.csv, line 2: no kernel"),
        (
            HEAD + "H100,fa3,fwd,bf16,1,1,32,32,128,4096,4096,1000,280",
            "137.4 by its shape, or a header 'flops",
        ),
        (HEAD + "H100,fa3,fwd\n", "t.csv, line 2: 3 cells, expected 13"),
        (HEAD.replace("seq_k,", ""), "t.csv, line 1: no column 'seq_k'"),
        (HEAD.replace(",time_us,tflops", ""), "t.csv, line 1: neither a column 'time_us' nor 'tflops'"),
        (HEAD, "t.csv, line 1: no rows below the columns"),
        ("", "t.csv, line 1: no rows"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_line(text: str, message: str) -> None:
    with pytest.raises(TableError) as caught:
        kernel_table(parse_csv(text, "t.csv"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_of_collectives_are_no_tables_of_kernels() -> None:
    assert not is_kernel_table(parse_csv("# ranks: 8\nsize_B,time_us\n1,2\n", "t.csv"))
    assert is_kernel_table(parse_csv(HEAD, "t.csv"))


def test_names_of_others() -> None:
    assert [gpu_alias(name) for name in ("H100 80GB", "NVIDIA H200", "A100-SXM4-80GB", "RTX 4090", "MI300X")] == [
        "h100", "h200", "a100", "rtx-4090", "mi300x",
    ]  # fmt: skip
    assert kernel_alias("aiter-asm-a32") == "aiter-asm"
    table = kernel_table(parse_csv(HEAD + "B200,trtllm_mha,fwd,bf16,1,1,8,1,128,4096,4096,99,\n", "t.csv"))
    assert table.rows[0].kernel == "sglang-trtllm-gen"
