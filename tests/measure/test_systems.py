"""The mapping of measured libraries to schedules, options, stacks and kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import msgspec
import pytest

from tasp_lab.core.errors import TableError
from tasp_lab.machines.stack import load_stack
from tasp_lab.measure.accuracy.layer import LibraryRun, library_run
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

Hops = Callable[[int], float]

RUNS = {
    ("ring-flash-attention(zhuzilin)", "ring"): "ring-attention",
    ("ring-flash-attention(zhuzilin)", "zigzag varlen"): "zigzag-ring-attention",
    ("ring-flash-attention style", "striped"): "striped-ring-attention",
    ("zigzag", "zigzag 8"): "zigzag-ring-attention",
    ("USP (yunchang)", "ulysses 8 x basic ring 1; qkv packed"): "usp:8x1:ring-attention",
    ("USP (yunchang)", "ulysses 1 x zigzag 8 (LongContextAttention)"): "usp:1x8:zigzag-ring-attention",
    ("USP (yunchang)", "ulysses 4 x striped 2; not packed"): "usp:4x2:striped-ring-attention",
    ("USP (yunchang)", "ring basic (ring_flash_attn)"): "ring-attention",
    ("USP (yunchang)", "usp striped 2x4"): "usp:2x4:striped-ring-attention",
    ("usp", "ulysses 2 x stripe 4"): "usp:2x4:striped-ring-attention",
    ("ulysses", "ulysses 8"): "ulysses",
    ("loongtrain", "double ring, zigzag, context 8, window 2"): "double-ring:2x4",
    ("TE", "ring p2p (zigzag for causal)"): "zigzag-ring-attention",
    ("TE", "kv all-gather"): "multi-ring-kv-all-gather",
    ("Megatron/TE baseline", "ulysses"): "ulysses",
    ("USP", "usp ulysses 8 x ring n/8"): "usp:8x1:zigzag-ring-attention",
    ("LoongTrain", "head-parallel 8 x double ring n/8"): "usp:8x1:zigzag-ring-attention",
    ("MagiAttention", "all-to-all-v"): "direct-attention",
    ("BurstAttention", "ring fwd, dQ-circulating bwd"): "burst",
    ("FlashAttention", "single GPU"): "ring-attention",
}
"""Schedules under a causal mask on eight GPUs."""

LEFT_OUT = [
    ("ring-flash-attention(zhuzilin)", "llama3 kv all-gather varlen"),
    ("ring-flash-attention(zhuzilin)", "theoretic (1 GPU flash-attn / 8)"),
    ("MagiAttention", "native groupcast"),
    ("Megatron HybridCP", "hybrid dcp"),
    ("TE ring p2p", "TE ring p2p"),
    ("NeMo/Megatron", "TP 2 x CP 2 (p2p ring)"),
    ("PyTorch context_parallel", "CP 8 (KV all-gather, head-tail balance)"),
    ("xDiT", "ulysses 4"),
    ("Meta CP", "ring pass-KV + TP8"),
]


@pytest.mark.parametrize(("system", "variant"), list(RUNS))
def test_the_schedule_of_a_library_can_be_built_with_its_options(system: str, variant: str) -> None:
    run = library_run(system, variant, causal=True, ranks=8)
    assert run.schedule == RUNS[system, variant]
    assert not run.stack or not load_stack(run.stack).host(run.schedule).is_instant
    assert not run.reason
    assert "/" in run.source or run.schedule == "ring-attention"
    layer = Workload(64, heads=16, kv_heads=8, head_dim=8, mask="causal")
    passes = attention_schedules(run.schedule, full_mesh(8), layer, None, run.options("both"))
    assert [each.task.passing for each in passes if each.task is not None] == ["forward", "backward"]
    assert attention_schedules(run.schedule, full_mesh(8), layer, None, run.options("forward"))


@pytest.mark.parametrize(("system", "variant"), LEFT_OUT)
def test_what_cannot_be_simulated_says_why(system: str, variant: str) -> None:
    run = library_run(system, variant, causal=True, ranks=8)
    assert not run.schedule
    assert len(run.reason.split()) > 3


def test_a_ring_of_transformer_engine_is_zigzag_under_a_causal_mask_only() -> None:
    assert library_run("TE", "ring p2p (zigzag for causal)", causal=False, ranks=8).schedule == "ring-attention"


@pytest.mark.parametrize(
    ("system", "variant", "keys_hops", "gradient_hops"),
    [
        # in the library n - 1 hops of keys and n of gradients, of 4 bytes instead of 2
        ("ring-flash-attention(zhuzilin)", "ring", lambda n: n - 1, lambda n: 2 * (n - 1) * (1 - 1 / n)),
        ("ring-flash-attention(zhuzilin)", "zigzag", lambda n: n - 1, lambda n: 2 * (n - 1) * (1 - 1 / (2 * n))),
        ("ring-flash-attention(zhuzilin)", "striped", lambda n: n - 1, lambda n: 2 * (n - 1)),
        # in the library n - 1 hops of either, of 2 bytes
        ("TE", "ring p2p", lambda n: n - 2, lambda n: (n - 1) * (1 - 1 / (2 * n))),
    ],
)
@pytest.mark.parametrize("n", [4, 16])
def test_nearly_all_bytes_of_the_libraries_move_backward(
    system: str, variant: str, keys_hops: Hops, gradient_hops: Hops, n: int
) -> None:
    """Blocks without a part do not move; what that leaves out is stated in the file."""
    layer, mesh = Workload(8 * n, heads=4, head_dim=8, mask="causal"), full_mesh(n)
    run = library_run(system, variant, causal=True, ranks=n)
    forward, backward = attention_schedules(run.schedule, mesh, layer, None, run.options("both"))
    keys = 8 * n * 4 * 8 * 2 * 2
    assert int(forward.bytes_sent().sum()) == (n - 1) * keys
    assert int(backward.bytes_sent().sum()) == keys * (keys_hops(n) + gradient_hops(n))


def test_an_unknown_system_is_refused_by_name() -> None:
    with pytest.raises(TableError, match="system 'mine', variant 'fast': not known"):
        library_run("mine", "fast", causal=True, ranks=8)


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(TableError, match="ranks 12: expected a multiple of 8"):
        library_run("USP", "usp ulysses 8 x ring n/8", causal=True, ranks=12)


def test_options_of_a_forward_pass_leave_out_those_of_gradients() -> None:
    run = library_run("TE", "ring p2p", causal=True, ranks=8)
    assert run.options("forward") == AttentionOptions("forward", trim=False, direction="ascending")
    assert (run.kernel("b200"), run.kernel("h100"), run.kernel(None)) == (
        "cudnn",
        "flash-attention-3",
        "flash-attention-3",
    )


def ultraattn(variant: str) -> LibraryRun:
    """A ring of the table of UltraAttn."""
    source = "github.com/oliverYoung2001/UltraAttn b5aa10e1 : results_exp/some.log"
    return library_run("ring-flash-attention(zhuzilin)", variant, causal=True, ranks=8, source=source)


@pytest.mark.parametrize("variant", ["ring", "zigzag", "striped"])
def test_a_source_that_changed_a_library_has_its_own_stack(variant: str) -> None:
    named = library_run("ring-flash-attention(zhuzilin)", variant, causal=True, ranks=8)
    changed = ultraattn(variant)
    assert (changed.schedule, changed.fields) == (named.schedule, named.fields)
    assert (changed.stack, named.stack) == ("ultraattn", "ring-flash-attn")


def test_every_entry_is_tested() -> None:
    """The systems above choose all entries of the file."""
    entries = msgspec.toml.decode((files("tasp_lab.measure.accuracy") / "systems.toml").read_bytes())["entries"]
    sources = {library_run(*each, causal=True, ranks=8).source for each in RUNS} | {ultraattn("ring").source}
    assert {each["source"] for each in entries if "schedule" in each} == sources
