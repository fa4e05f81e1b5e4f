"""``gpu-check --one --measure`` without a GPU: tables are read back, and times are those of the right calls."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from runtime.kernels import libraries
from runtime.kernels.libraries import LIBRARIES, Case, KernelCall, Library, Overlap, RankZero
from runtime.kernels.timing import CallShape
from tasp_lab.core.errors import RunError
from tasp_lab.measure.accuracy.kernel import evaluate_kernel
from tasp_lab.measure.calibrate_kernels import calibrate_kernels
from tasp_lab.measure.readers import find_all_tables
from tasp_lab.measure.readers.kernel_table import attention_shape, read_kernel_table
from tasp_lab.validation import gpu_check
from tasp_lab.validation.gpu_check import gpu_check_one
from tasp_lab.validation.measurements import COLUMNS, DEFAULT_MINUTES, MEASUREMENTS, Measurement, Tables, measure

CPU = torch.device("cpu")
SHAPE = CallShape(2, 4, 2, 16, 64, 64, True)


def tables_in(folder: Path) -> Tables:
    return Tables(folder, CPU, "full-mesh:4")


def of(*cases: Case) -> Measurement:
    return Measurement("some calls", "how fast?", "nothing", 1, cases)


def run(folder: Path, *cases: Case, told: list[str] | None = None) -> tuple[dict[str, object], str]:
    """What was measured, and why nothing was."""
    numbers: dict[str, object] = {}
    progress = ([] if told is None else told).append
    return numbers, measure(of(*cases), tables_in(folder), time.monotonic() + 600, progress, numbers)


def cells(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


# The plan


def test_the_plan_fits_into_its_time_and_names_each_case_once() -> None:
    assert sum(each.minutes for each in MEASUREMENTS) < DEFAULT_MINUTES
    for each in MEASUREMENTS:
        assert len({case.label for case in each.cases}) == len(each.cases)
    kernels = {name for each in MEASUREMENTS for name in each.tables} - COLUMNS.keys()
    assert kernels < LIBRARIES.keys(), "tables have columns that are documented, or are of kernels"
    assert {case.library for each in MEASUREMENTS for case in each.cases} == LIBRARIES.keys() - {"torch-sdpa"}


def test_blocks_of_tasp_are_those_of_its_script() -> None:
    shapes = {case.shape for case in MEASUREMENTS[3].cases if case.shape.head_dim == 64}
    assert len(shapes) == 5 * 3 - 1, "48 sequences of 128 blocks have more positions than the script takes"
    assert {(each.heads, each.kv_heads, each.causal) for each in shapes} == {(20, 20, False)}


def test_a_short_run_has_every_kernel_and_shape_of_the_overlap() -> None:
    cases = next(each.cases for each in MEASUREMENTS if each.name == "overlap")
    assert {(case.library, case.shape) for case in cases[:12]} == {(case.library, case.shape) for case in cases}


# Calls


@pytest.fixture
def on_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 is torch's operator, which is one of it, for processors."""
    monkeypatch.setitem(LIBRARIES, "flash-attention-2", replace(LIBRARIES["torch-sdpa"], runs="flash"))


def test_tables_of_calls_are_read_by_calibrate_and_accuracy(
    tmp_path: Path, on_processor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [SHAPE._replace(queries=length, keys=length) for length in (64, 128, 192, 256, 320)]
    calls = [KernelCall("flash-attention-2", shape, passing) for shape in shapes for passing in ("fwd", "bwd")]
    assert run(tmp_path, *calls) == ({"measured": 10}, "")
    path = tmp_path / "flash-attention-2.csv"
    table = read_kernel_table(path)
    expected = [
        attention_shape(passing, "bf16", 2, 4, 2, 16, shape.queries, shape.keys, causal=True)
        for shape in shapes
        for passing in ("forward", "backward")
    ]
    assert [row.shapes for row in table.rows] == [(each,) for each in expected]
    assert {row.kernel for row in table.rows} == {"flash-attention-2"}
    assert table.timing == "kernel"
    assert {"source", "date", "machine", "gpu", "sms"} <= table.headers.keys()
    fitted = calibrate_kernels([path])
    assert fitted.document["rows"] == {"forward": 5, "backward": 5}

    path.write_text(path.read_text().replace(f"# gpu: {table.headers['gpu']}", "# gpu: NVIDIA H200"))
    compared = evaluate_kernel(read_kernel_table(path))
    assert len(compared.errors) == 10, compared.reason
    by_name = {Path(each.name).name: each for each in find_all_tables([tmp_path])}
    assert by_name.keys() == {"flash-attention-2.csv", "gpu-kernels.csv"}, "a table without reader is no error"
    kernels = cells(tmp_path / "gpu-kernels.csv")
    assert {row["what"] for row in kernels} == {call.label for call in calls}
    assert all(float(row["time_us"]) > 0 and int(row["calls"]) > 0 for row in kernels)


def sleepy(counts: Counter[str], seconds: Mapping[str, float]) -> Library:
    def calls(shape: CallShape, device: torch.device) -> Mapping[str, Callable[[], None]]:
        def call(passing: str) -> None:
            counts[passing] += 1
            torch.ones(4).add_(1)
            time.sleep(seconds[passing])

        return {each: lambda each=each: call(each) for each in seconds}

    return Library(lambda *_: None, calls, "nothing", "aten::")


def test_times_are_microseconds_of_the_pass_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[str]()
    monkeypatch.setitem(LIBRARIES, "torch-sdpa", sleepy(counts, {"fwd": 0.002, "bwd": 0.02}))
    run(tmp_path, KernelCall("torch-sdpa", SHAPE, "bwd"))
    assert counts == {"bwd": 2 + 5 + 1}, "two that warm up, five that are timed, one that is profiled"
    (row,) = cells(tmp_path / "torch-sdpa.csv")
    assert 20e3 <= float(row["time_us"]) < 40e3
    run(tmp_path, KernelCall("torch-sdpa", SHAPE, "fwd"))
    assert counts["fwd"] == 8
    (row,) = cells(tmp_path / "torch-sdpa.csv")
    assert (row["pass"], row["seq_q"], row["kv_heads"]) == ("fwd", "64", "2")
    assert 2e3 <= float(row["time_us"]) < 10e3


def test_the_time_of_another_kernel_is_not_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what should be cuDNN runs torch's flash operator, as torch does where cuDNN refuses a call."""
    monkeypatch.setitem(LIBRARIES, "cudnn", replace(LIBRARIES["torch-sdpa"], runs="cudnn"))
    told = "1 failed: cudnn 2x4/2x16 64x64 causal fwd: .*, expected a kernel of cudnn$"
    with pytest.raises(RunError, match=told):
        run(tmp_path, KernelCall("cudnn", SHAPE, "fwd"), KernelCall("torch-sdpa", SHAPE, "fwd"))
    assert (tmp_path / "torch-sdpa.csv").exists()
    assert not (tmp_path / "cudnn.csv").exists()


def test_what_is_missing_is_one_line_that_names_what_to_install(tmp_path: Path) -> None:
    told: list[str] = []
    calls = [KernelCall("flash-attention-3", SHAPE, passing) for passing in ("fwd", "bwd")]
    _, skipped = run(tmp_path, *calls, told=told)
    assert told == [f"not measured: {skipped}"]
    assert skipped.startswith("flash-attention-3: it runs on cuda, not cpu; install the folder hopper of")
    assert list(tmp_path.iterdir()) == []
    missing = {name: each.missing(name, SHAPE, CPU) for name, each in LIBRARIES.items()}
    assert all(line.count("\n") == 0 and "; install " in line for line in missing.values() if line)
    assert missing["torch-sdpa"] == missing["torch"] == ""


@dataclass(frozen=True)
class Slow:
    """A case that takes a second of a clock."""

    label: str
    clock: list[float]
    library: str = "torch-sdpa"
    shape: CallShape = SHAPE
    tables: ClassVar = ("times",)

    def problem(self, device: torch.device) -> str:
        return ""

    def rows(self, device: torch.device) -> Mapping[str, list[dict[str, object]]]:
        self.clock[0] += 1
        if self.label == "b":
            raise RunError("no such call")
        return {"times": [{"label": self.label}]}


def test_what_found_no_time_is_named_and_what_failed_does_not_end_it(tmp_path: Path) -> None:
    clock = [0.0]
    cases = [Slow(label, clock) for label in "abcde"]
    numbers: dict[str, object] = {}
    with pytest.raises(RunError, match="1 failed: b: no such call"):
        measure(of(*cases), tables_in(tmp_path), 3.0, lambda line: None, numbers, lambda: clock[0])
    assert numbers == {"measured": 2, "no_time_for": ["d", "e"], "failed": ["b: no such call"]}
    assert cells(tmp_path / "times.csv") == [{"label": "a"}, {"label": "c"}]
    assert measure(of(*cases), tables_in(tmp_path), 0.0, lambda _: None, {}, lambda: clock[0]) == "no time was left"


# Rank 0 of several


@pytest.mark.parametrize(("variant", "ranks"), [("alltoall", 2), ("allgather", 4)])
def test_torch_on_rank_0_makes_a_call_per_block(variant: str, ranks: int, tmp_path: Path) -> None:
    case = RankZero("torch", SHAPE._replace(kv_heads=4), variant, ranks)
    assert run(tmp_path, case)[0]["measured"] == 1
    assert not dist.is_initialized()
    (row,) = cells(tmp_path / "rank-0.csv")
    assert (row["library"], row["variant"], row["ranks"], row["pass"]) == ("torch", variant, str(ranks), "fwd")
    assert float(row["time_us"]) > 0
    assert float(row["host_us"]) > 0
    (calls,) = [each for each in cells(tmp_path / "gpu-kernels.csv") if "flash_attention" in each["kernel"]]
    assert int(calls["calls"]) == ranks, "its own block, and one of each other rank"
    assert calls["what"] == f"torch 2x4/4x16 64x64 causal, {variant}, rank 0 of {ranks}"


def ring_of_tests(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Sends and receives in each step, as a ring does; blocks that arrive are what their memory was."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.zeros_like(q)
    for _ in range(ranks):
        found = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        total = total + found.transpose(1, 2)
        received = torch.zeros_like(k)
        ends = [dist.P2POp(dist.isend, k.detach().contiguous(), (rank + 1) % ranks)]
        ends += [dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
    return total


def test_both_passes_of_a_ring_are_timed_and_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ring_flash_attn")
    module.zigzag_ring_flash_attn_func = ring_of_tests  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ring_flash_attn", module)
    libraries._import_error.cache_clear()
    try:
        run(tmp_path, RankZero("ring-flash-attn", SHAPE, "zigzag_ring"))
    finally:
        libraries._import_error.cache_clear()
    assert [row["pass"] for row in cells(tmp_path / "rank-0.csv")] == ["fwd", "bwd"]
    calls = {(row["pass"], row["kernel"]): int(row["calls"]) for row in cells(tmp_path / "gpu-kernels.csv")}
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls["fwd", flash] == 8
    assert calls["bwd", f"{flash}_backward"] == 8
    assert ("bwd", flash) not in calls, "the forward pass is not in the time of the backward pass"


class Engine:
    """Transformer Engine's attention as far as it is called: it checks arguments as its documents have them."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, heads: int, head_dim: int, **sizes: Any) -> None:
        self.group: tuple[Any, ...] = ()
        Engine.made.append({"heads": heads, "head_dim": head_dim, **sizes})

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, travels: str) -> None:
        self.group = (dist.get_world_size(group), ranks, travels)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **lengths: Any) -> torch.Tensor:
        Engine.made[-1] |= {"group": self.group, "q": tuple(q.shape), "k": tuple(k.shape)}
        Engine.made[-1] |= {name: getattr(each, "tolist", lambda each=each: each)() for name, each in lengths.items()}
        return (q * v.mean() + k.mean()).flatten(-2)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    module = ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        monkeypatch.setenv(name, "")
    Engine.made.clear()
    return Engine.made


def test_transformer_engine_gets_lengths_of_all_ranks(engine: list[dict[str, Any]]) -> None:
    with libraries.first_of(8):
        calls = LIBRARIES["transformer-engine"].calls(SHAPE._replace(batch=1), CPU, "p2p thd", 8)
    assert calls.keys() == {"fwd", "bwd"}
    calls["bwd"]()
    assert os.environ["NVTE_FLASH_ATTN"] == "0"
    assert engine == [{
        "heads": 4, "head_dim": 16, "num_gqa_groups": 2, "qkv_format": "thd", "attn_mask_type": "padding_causal",
        "group": (8, list(range(8)), "p2p"), "q": (64, 4, 16), "k": (64, 2, 16),
        "cu_seqlens_q": [0, 512], "max_seqlen_q": 512, "cu_seqlens_kv": [0, 512], "max_seqlen_kv": 512,
    }]  # fmt: skip


def test_a_packed_call_has_its_own_lengths_and_a_dense_one_none(engine: list[dict[str, Any]]) -> None:
    LIBRARIES["cudnn-thd"].calls(SHAPE._replace(queries=32, causal=False), CPU)
    packed = engine[-1]
    assert (packed["cu_seqlens_q"], packed["cu_seqlens_kv"]) == ([0, 32, 64], [0, 64, 128])
    assert (packed["attn_mask_type"], packed["group"], packed["q"]) == ("padding", (), (64, 4, 16))
    libraries.transformer_engine(SHAPE, CPU, "bshd")
    assert (engine[-1]["attn_mask_type"], engine[-1]["q"]) == ("causal", (2, 64, 4, 16))
    assert "cu_seqlens_q" not in engine[-1]


@pytest.mark.parametrize(("name", "gates"), [("simple_gla", (2, 64, 4)), ("gla", (2, 64, 4, 16))])
def test_linear_attention_has_a_decay_per_head_or_channel(
    name: str, gates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def operator(q: Any, k: Any, v: Any, g: Any, scale: float) -> tuple[Any, None]:
        seen.append((g.shape, bool((g < 0).all()), q.shape, k.shape))
        return q * k * v, None

    module = ModuleType(f"fla.ops.{name}")
    setattr(module, f"chunk_{name}", operator)
    monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    calls = LIBRARIES[f"fla-chunk_{name}"].calls(SHAPE._replace(kv_heads=4), CPU)
    assert len(calls["bwd"]()) == 3
    assert seen == [(gates, True, (2, 64, 4, 16), (2, 64, 4, 16))]


# A copy beside a call, on a GPU that is a clock per stream


class Gpu:
    """Streams as clocks in milliseconds. A copy on a stream of normal priority waits until the call has ended."""

    def __init__(self) -> None:
        self.now: dict[int, float] = {}
        self.stream = 0
        self.priority = {0: 0}
        self.call_ends = 0.0

    def make_stream(self, priority: int = 0) -> Any:
        number = len(self.priority)
        self.priority[number] = priority
        return SimpleNamespace(number=number, wait_event=lambda event: self.go_to(number, event.at))

    def go_to(self, number: int, at: float) -> None:
        self.now[number] = max(self.now.get(number, 0.0), at)

    def take(self, milliseconds: float) -> None:
        self.now[self.stream] = self.now.get(self.stream, 0.0) + milliseconds

    def attend(self) -> None:
        self.take(4.0)
        self.call_ends = self.now[self.stream]

    def copy(self) -> None:
        if self.priority[self.stream] == 0 and self.stream:
            self.go_to(self.stream, self.call_ends)
        self.take(1.0)

    def make_event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now.get(self.stream, 0.0))
        event.elapsed_time = lambda later: later.at - event.at
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class On:
        def __init__(self, stream: Any) -> None:
            self.number = stream.number

        def __enter__(self) -> None:
            gpu.stream = self.number

        def __exit__(self, *_: object) -> None:
            gpu.stream = 0

    for name, value in {
        "Stream": gpu.make_stream, "Event": gpu.make_event, "stream": On, "synchronize": lambda *_: None,
        "_sleep": lambda cycles: gpu.take(cycles / 1e6),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu


@pytest.mark.parametrize(
    ("delay_us", "high", "copy_us", "together_us"),
    [(0, False, 5000, 5000), (500, False, 4500, 5000), (500, True, 1000, 4000), (3500, True, 1000, 4500)],
)
def test_a_copy_is_timed_from_when_it_is_ready(
    delay_us: int, high: bool, copy_us: float, together_us: float, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of 4 ms and a copy of 1 ms: with normal priority the copy waits for the call, with high it does not."""
    library = Library(lambda *_: None, lambda *_: {"fwd": gpu.attend}, "nothing")
    monkeypatch.setitem(LIBRARIES, "torch-sdpa", library)
    blocks = []
    kernels = ModuleType("runtime.kernels.fused_triton")
    kernels.launch_copy = lambda into, source, count: (blocks.append((into.nbytes, count)), gpu.copy())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "runtime.kernels.fused_triton", kernels)
    monkeypatch.setattr(libraries, "dtype_on", lambda device: torch.float32)
    for name in ("time_s", "batch_s"):  # the device of tensors is the processor, that of times is not
        timed = getattr(libraries, name)
        on_gpu = SimpleNamespace(type="cuda")
        monkeypatch.setattr(libraries, name, lambda *call, timed=timed, on=on_gpu: timed(*call[:-1], on))
    (row,) = Overlap("torch-sdpa", SHAPE, 16, 4096, delay_us, high).rows(CPU)["overlap"]
    assert set(blocks) == {(4096, 16)}
    times = {name: float(row[name]) for name in row if str(name).endswith("_us") and name != "delay_us"}
    assert times == pytest.approx({
        "attention_alone_us": 4000, "copy_alone_us": 1000, "attention_us": 4000, "copy_us": copy_us,
        "together_us": together_us,
    })  # fmt: skip
    assert (row["blocks"], row["delay_us"], row["high_priority"], row["queries"]) == (16, delay_us, int(high), 64)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_copy_copies_all_by_any_number_of_blocks() -> None:
    code = "from tests.validation.test_measurements import copy_in_the_interpreter as copy; copy()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=240)


def copy_in_the_interpreter() -> None:
    from runtime.kernels.fused_triton import COPIED, launch_copy

    for elements in (1, COPIED, 5 * COPIED + 3):
        for blocks in (1, 2, 32):
            source, into = (
                torch.arange(1, elements + 1, dtype=torch.int32),
                torch.zeros(elements + 1, dtype=torch.int32),
            )
            launch_copy(into[:-1], source, blocks)
            assert torch.equal(into[:-1], source)
            assert into[-1] == 0


# The whole check


def test_measurements_come_first_and_leave_their_time_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "measured_table", lambda _: pytest.fail("no time was left"))
    ends: list[float] = []
    began: list[str] = []

    def measured(
        measurement: Measurement, tables: Tables, ends_s: float, progress: object, numbers: dict[str, object]
    ) -> str:
        ends.append(ends_s)
        began.append(measurement.name)
        clock[0] += 60 * DEFAULT_MINUTES if measurement is MEASUREMENTS[-1] else 10
        return ""

    monkeypatch.setattr(gpu_check, "measure", measured)
    (tmp_path / "test_late.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_late(): pytest.fail('it ran')\n")
    tests = (str(tmp_path / "test_late.py"),)
    record = gpu_check_one(ranks=2, minutes=DEFAULT_MINUTES, output=tmp_path, tests=tests)
    assert began == [each.name for each in MEASUREMENTS]
    assert [step.name for step in record.steps] == ["environment", *began, "late", "kernel times"]
    assert ends[0] == 100 + 60 * MEASUREMENTS[0].minutes
    assert [later - sooner for sooner, later in pairwise(ends)] == pytest.approx(
        [60 * each.minutes for each in MEASUREMENTS[1:]]
    )
    assert [(each.verdict, each.message) for each in record.steps[-2:]] == [("skipped", "no time was left")] * 2


@pytest.mark.parametrize(("minutes", "message"), [(0, "--minutes: 0, expected more than 0"), (15, "needs a GPU")])
def test_measuring_without_time_or_gpu_is_refused(minutes: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        gpu_check_one(minutes=minutes, output=tmp_path / "record")
    assert not (tmp_path / "record").exists()
