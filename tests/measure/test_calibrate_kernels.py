"""``calibrate --kernels``: a kernel of a GPU that is not there, from a table of its times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasp_lab.core.errors import FitError, QuantityError, TableError
from tasp_lab.machines.kernel_model import attention_kernel
from tasp_lab.measure.calibrate_kernels import calibrate_kernels
from tasp_lab.measure.readers.kernel_table import attention_shape
from tests.conftest import Command

HEAD = "gpu,kernel,pass,dtype,causal,batch,heads,kv_heads,head_dim,seq_q,seq_k,time_us,tflops\n"
SHAPES = [(heads, length, causal) for heads in (1, 8, 64) for length in (512, 2048, 8192) for causal in (False, True)]


def times(gpu: str, passing: str = "fwd", slower: float = 1.0) -> str:
    """Rows of a kernel that is known, on a GPU of another name."""
    known = attention_kernel("h100", "flash-attention-3")
    long = {"fwd": "forward", "bwd": "backward"}[passing]
    lines = []
    for heads, length, causal in SHAPES:
        shape = attention_shape(long, "bf16", 1, heads, heads, 128, length, length, causal=causal)  # type: ignore[arg-type]
        time_us = known.time_s(shape) * 1e6 * slower
        lines.append(f"{gpu},fa3,{passing},bf16,{causal:d},1,{heads},{heads},128,{length},{length},{time_us},\n")
    return "".join(lines)


def test_the_file_predicts_other_shapes_of_the_kernel_it_was_fitted_to(tmp_path: Path) -> None:
    table, output = tmp_path / "log.csv", tmp_path / "kernel.toml"
    headers = "# sms: 132\n# memory_gb_per_s: 2950\n"
    table.write_text(headers + HEAD + times("B77", slower=1.3) + times("B77", "bwd", 1.3))
    found = calibrate_kernels([table])
    found.save(output)
    kernel, known = attention_kernel("b77", str(output)), attention_kernel("h100", "flash-attention-3")
    assert kernel.gpu.sms.value == 132
    for passing in ("forward", "backward"):
        shape = attention_shape(passing, "bf16", 2, 16, 16, 128, 3000, 5000, causal=False)  # type: ignore[arg-type]
        assert kernel.time_s(shape) == pytest.approx(1.3 * known.time_s(shape), rel=0.08)


def test_an_unknown_gpu_is_assumed_and_a_pass_without_rows_too(tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    table.write_text(HEAD + times("B77"))
    found = calibrate_kernels([table])
    assert found.notes[0] == "backward: no rows; assumed at the rate of forward"
    assert "assumed: no header 'sms'" in found.notes[1]
    backward = next(variant for variant in found.result.variants if variant.passing == "backward")
    assert backward.rate.high / backward.rate.low >= 3


@pytest.mark.parametrize(
    ("text", "profile", "message"),
    [
        (times("A100"), "h100-8", "log.csv, line 2: measured on a100, expected h100, the GPU of h100-8"),
        (times("B77") + times("B78"), None, "flash-attention-3 on b78, expected one kernel on one GPU"),
        (times("B77"), "dgx-1v", "profile dgx-1v: its GPU is not known"),
    ],
)
def test_rows_of_another_gpu_are_refused(tmp_path: Path, text: str, profile: str | None, message: str) -> None:
    (tmp_path / "log.csv").write_text(HEAD + text)
    with pytest.raises(TableError, match=message):
        calibrate_kernels([tmp_path / "log.csv"], profile)


def test_nothing_to_fit(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(HEAD + times("B77").replace(",fwd,", ",fwdbwd,"))
    with pytest.raises(FitError, match="no row of one pass"):
        calibrate_kernels([tmp_path / "log.csv"])
    with pytest.raises(QuantityError, match="expected no tables beside it"):
        calibrate_kernels(["live", tmp_path / "log.csv"])


def test_the_command(command: Command, tmp_path: Path) -> None:
    table, output = tmp_path / "log.csv", tmp_path / "kernel.toml"
    table.write_text(HEAD + times("H100", slower=1.3))
    found = json.loads(
        command("calibrate", "--kernels", str(table), "--profile", "h100-8", "--output", str(output), "--json").stdout
    )  # type: ignore[attr-defined]
    assert (found["gpu"], found["kernel"], found["rows"]) == ("h100", "flash-attention-3", {"forward": len(SHAPES)})
    assert found["accepted"]
    judged = found["acceptance"]["forward"]
    assert judged["held_out_rows"] == len(SHAPES)
    assert judged["mean_relative_error_before"] == pytest.approx(1 - 1 / 1.3)
    assert judged["mean_relative_error_held_out"] < judged["mean_relative_error_before"]
    assert attention_kernel("h100", str(output)).name == "flash-attention-3"


def test_a_kernel_that_is_predicted_exactly_is_not_replaced(command: Command, tmp_path: Path) -> None:
    """No fit is better than the constants that the times were made with."""
    table, output = tmp_path / "log.csv", tmp_path / "kernel.toml"
    table.write_text(HEAD + times("H100"))
    done = command("calibrate", "--kernels", str(table), "--output", str(output))
    assert done.returncode == 2
    assert "kernel.toml: not written, forward: the fit is no better on rows it was not fitted to" in done.stderr
    assert not output.exists()
    forced = command("calibrate", "--kernels", str(table), "--output", str(output), "--force", "--json")
    assert (forced.returncode, json.loads(forced.stdout)["accepted"], output.exists()) == (0, False, True)
