"""Stacks: what each file states, which kernel and host it gives, what it ships, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasp_lab import compare, predict, predict_step
from tasp_lab.core.errors import ProfileError, ScheduleError, TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import KernelCompute, with_kernel
from tasp_lab.machines.host import INSTANT_HOST
from tasp_lab.machines.kernel_model import attention_kernel
from tasp_lab.machines.kernel_model.catalogue import gpu_names, kernel_by_shape, kernel_names
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import OWN_STACK, Shipped, load_stack, shipping, stack_names
from tasp_lab.prediction.inputs import run_by_stack
from tasp_lab.prediction.training_step.layout import Layout
from tasp_lab.schedules.registry import ATTENTION
from tasp_lab.validation import fabric_runs
from tasp_lab.workload.kernel_shapes import KernelShape, Passing
from tasp_lab.workload.layer import Workload
from tests.conftest import Tell

LAYER = Workload(16384, heads=16, kv_heads=8, mask="causal")
NAMES = [*ATTENTION, "usp:4x2", "usp:4x2:zigzag-ring-attention", "grid:2x4", "double-ring:4x2", "kv-all-gather"]


def has_source(text: str) -> bool:
    """An assumption, a place, or the source of the line before."""
    return text.startswith(("assum", "the same")) or "/" in text or ".py" in text


@pytest.mark.parametrize("name", stack_names())
def test_every_line_has_a_source(name: str) -> None:
    stack = load_stack(name)
    assert stack.summary
    assert stack.library
    assert stack.version
    sources = [stack.source, *(each.source for each in (*stack.kernels, *stack.schedules))]
    assert all(map(has_source, sources)), [each for each in sources if not has_source(each)]
    assert stack.schedules
    for how in stack.schedules:
        assert any(how.matches(each) for each in NAMES), how.schedules
        assert bool(how.host_source) == ("/" in how.host), "a host of another stack is an assumption"
        assert not how.host_source or how.host_source.startswith("assumed")


@pytest.mark.parametrize("name", stack_names())
def test_hosts_take_between_a_microsecond_and_a_millisecond_per_call(name: str) -> None:
    """A launch from C takes some microseconds (NVIDIA's documents), and Python no milliseconds for a few of them."""
    hosts = [load_stack(name).host(schedule) for schedule in NAMES]
    for host in hosts:
        if host != INSTANT_HOST:
            assert all(5e-6 <= seconds <= 1e-3 for seconds in (host.call_s, host.backward_call_s, host.batch_s))
            assert {field for field, _ in host.sources} == {"call_s", "backward_call_s", "batch_s"}
            assert all(map(has_source, dict(host.sources).values()))


@pytest.mark.parametrize("name", stack_names())
def test_kernels_are_known_on_some_accelerator(name: str) -> None:
    rules = load_stack(name).kernels
    passes: tuple[Passing, ...] = ("forward", "backward")
    taken = [kernel_by_shape(each.kernel, passing) for each in rules for passing in passes]
    assert all(any(kernel in kernel_names(gpu) for gpu in gpu_names()) for kernel in taken)


@pytest.mark.parametrize("name", stack_names())
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_what_turns_a_schedule_on_is_filled(name: str, mask: str) -> None:
    layer = Workload(16384, heads=16, kv_heads=8, mask=mask)
    found = [how for each in NAMES if (how := load_stack(name).shipped(each, layer, 8)) is not None]
    assert all("{" not in how.text for how in found)


@pytest.mark.parametrize(
    ("stack", "gpu", "head_dim", "kernel"),
    [
        ("torch", "h100", 128, "cudnn"),
        ("torch", "h100", 256, "flash-attention-2"),
        ("torch", "b200", 64, "cudnn"),
        ("torch", "a100", 128, "flash-attention-2"),
        ("torch", "rtx-pro-6000", 128, "flash-attention-2"),
        ("torch", "mi300x", 128, "flash-attention-2-ck"),
        ("trl", "h200", 128, "cudnn"),
        ("ring-flash-attn", "h100", 128, "flash-attention-2"),
        ("magi", "h100", 128, "flash-attention-3"),
        ("vllm-omni", "h100", 128, "flash-attention-2"),
        ("vllm-omni", "b200", 128, "cudnn"),
    ],
)
def test_the_kernel_follows_from_accelerator_and_head_size(stack: str, gpu: str, head_dim: int, kernel: str) -> None:
    """By the sources that the files name: cuDNN from Hopper on for heads of up to 128, then PyTorch's next choice."""
    found = load_stack(stack).kernel(gpu, Workload(8192, heads=8, head_dim=head_dim, mask="full"))
    assert found is not None
    assert found.name == kernel


@pytest.mark.parametrize(
    ("gpu", "dims", "kernel"),
    [
        ("h100", (192, 128), "cudnn"),
        ("b200", (192, 128), "cudnn"),
        ("a100", (192, 128), "flash-attention-2"),
        ("h100", (192, 64), "flash-attention-2"),
        ("h100", (128, 64), "cudnn"),
        ("h100", (64, 192), "flash-attention-2"),
        ("mi355x", (128, 64), "flash-attention-2-ck"),
    ],
)
def test_the_kernel_follows_from_the_widths_of_keys_and_values(gpu: str, dims: tuple[int, int], kernel: str) -> None:
    """PyTorch's check_cudnn_tensor_shapes: up to 128 elements, and keys of 192 with values of 128 (sdp_utils.cpp)."""
    layer = Workload(8192, heads=8, head_dim=dims[0], value_dim=dims[1])
    found = load_stack("torch").kernel(gpu, layer)
    assert found is not None
    assert found.name == kernel


def test_an_accelerator_without_a_rule_has_no_kernel() -> None:
    assert load_stack("magi").kernel("mi300x") is None
    assert load_stack("megatron").kernel("an-accelerator") is None


MINE = """
summary = "mine"
library = "mine"
version = "1"
source = "here/mine"
[[kernels]]
kernel = "flash-attention-3"
passes = ["forward"]
source = "here/mine"
[[kernels]]
kernel = "cudnn"
masks = ["causal"]
source = "here/mine"
[[schedules]]
schedules = "ulysses"
text = "on"
source = "here/mine"
"""


@pytest.mark.parametrize(
    ("stack", "machine"), [("trt-llm", "mi300x-8"), ("mindspeed", "h100-8"), ("magi", "l20-8-pcie")]
)
def test_a_stack_without_a_kernel_there_is_refused_unless_one_is_named(stack: str, machine: str) -> None:
    layer, name = Workload(16384, heads=16, mask="full"), "direct-attention" if stack == "magi" else "ulysses"
    with pytest.raises(ProfileError, match=f"stack '{stack}': no kernel on "):
        compare(machine, layer, stack=stack)
    kernel = kernel_names(load_machine(machine).accelerator)[0]
    assert predict(machine, name, layer, stack=stack, kernel=kernel, samples=0)[0].rates["forward"].kernel == kernel


def test_passes_may_have_kernels_of_their_own(tmp_path: Path) -> None:
    (file := tmp_path / "mine.toml").write_text(MINE)
    stack = load_stack(str(file))
    assert stack.kernel("h100", Workload(8192, mask="full")) is None, "no rule for the backward pass of full masks"
    found = stack.kernel("h100", Workload(8192, mask="causal"))
    assert found is not None

    def call(passing: Passing) -> KernelShape:
        numbers = (1, 8, 8, 128, 4096, 4096, -4096, 4096, 4 * 4096**2 * 8 * 128)
        return KernelShape("attend", "softmax", passing, "bf16", *numbers)

    assert found.time_s(call("forward")) == attention_kernel("h100", "flash-attention-3").time_s(call("forward"))
    assert found.time_s(call("backward")) == attention_kernel("h100", "cudnn").time_s(call("backward"))


def test_a_stack_may_name_a_kernel_as_its_vendor_does(tmp_path: Path) -> None:
    (file := tmp_path / "mine.toml").write_text(MINE.replace('"flash-attention-3"', '"torch_flow"'))
    assert load_stack(str(file)).rules("h100")[0].kernel == "tensorrt-llm"


def test_a_file_of_yours_is_a_stack(tmp_path: Path, tell: Tell) -> None:
    (file := tmp_path / "mine.toml").write_text(MINE)
    code, out, err = tell("predict", "h100-8", "--schedule", "ulysses", "--seq", "16Ki", "--mask", "causal", "--stack",
                          str(file), "--samples", "0", "--json")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["stack"] == str(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("summary = ", "sumary = "), "sumary"),
        (('schedules = "ulysses"', 'schedules = "("'), "no stack"),
        (('text = "on"', 'text = "on"\nhost = "rng"'), "unknown host 'rng'"),
        (('text = "on"', 'text = "on"\nhost = "megatron/rng"'), "unknown host 'rng', did you mean 'ring'"),
        (('kernel = "cudnn"', 'kernel = "cudn"'), "unknown kernel 'cudn', did you mean 'cudnn'"),
        (('kernel = "cudnn"', 'kernel = "cudnn"\naccelerators = ["hoper"]'), "did you mean 'hopper'"),
        (('text = "on"', 'text = "on {rank}"'), "unknown group 'rank', did you mean 'ranks'"),
        (('text = "on"', 'text = "on {"'), "no stack"),
        (('text = "on"', 'text = "on"\nheads_over = "u"'), "unknown group 'u'"),
        (('text = "on"', 'text = "on"\nmultiple = 0'), "multiple"),
        (('source = "here/mine"', 'source = ""'), "source"),
        (('summary = "mine"', 'summary = "mine"\nkernels_as = "toch"'), "unknown stack 'toch'"),
        (("[[kernels]]", "[[kernels]"), "no stack"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    (file := tmp_path / "wrong.toml").write_text(MINE.replace(*change))
    with pytest.raises(ProfileError, match=r"wrong\.toml") as refused:
        load_stack(str(file))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


LIMITS: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("megatron", "ulysses", {"kv_heads": 4}, "forward", "KV heads are a multiple of 8"),
    ("megatron", "usp:4x2", {"kv_heads": 2}, "forward", "KV heads are a multiple of 4"),
    ("megatron", "ring-attention", {}, "forward", "mask full only"),
    ("megatron", "zigzag-ring-attention", {"window": 64}, "forward", "without a window"),
    ("megatron", "zigzag-ring-attention", {"sequence": 16392}, "forward", "a multiple of 16 positions"),
    ("torch", "kv-all-gather", {"documents": (8192, 8192)}, "forward", "without packed documents"),
    ("hamilton", "tasp", {}, "both", "forward only"),
    ("xdit", "ulysses", {}, "forward", "mask full only"),
    ("torchtitan", "zigzag-ring-attention", {}, "both", "does not ship zigzag-ring-attention"),
]  # fmt: skip


@pytest.mark.parametrize(("stack", "schedule", "change", "passes", "words"), LIMITS)
def test_what_a_stack_lacks_is_said_in_one_line(
    stack: str, schedule: str, change: dict[str, Any], passes: Any, words: str
) -> None:
    given = {"sequence": 16384, "heads": 16, "kv_heads": 8, "mask": "causal"} | change
    layer = Workload(**given)
    assert words in load_stack(stack).refusal(schedule, layer, 8, passes)
    assert load_stack(stack).shipped(schedule, layer, 8, passes) is None
    with pytest.raises(ScheduleError, match="stack") as refused:
        predict("h100-8", schedule, layer, stack=stack, passes=passes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "mask", "stack"),
    [
        ("zigzag-ring-attention", "causal", "megatron"),
        ("zigzag-ring-attention", "causal", "trl"),
        ("ring-attention", "full", "ring-flash-attn"),
        ("kv-all-gather", "causal", "torch"),
        ("usp:4x2", "causal", "yunchang"),
        ("direct-attention", "causal", "magi"),
        ("grid:2x4", "full", "trt-llm"),
        ("tasp", "full", "mindspeed"),
    ],
)
def test_stacks_ship_schedules(name: str, mask: str, stack: str) -> None:
    layer = Workload(16384, heads=16, kv_heads=8, mask=mask)
    assert stack in {each.name for each, _ in shipping(name, layer, 8)}


def test_what_was_only_measured_and_tasp_lab_itself_are_not_shipped() -> None:
    """UltraAttn is a copy of rings that a table was made with; tasp-lab has every schedule, so it tells nothing."""
    names = {stack.name for each in NAMES for stack, _ in shipping(each, LAYER, 8)}
    assert not names & {"ultraattn", "burst", "internevo", "magi-baselines", "magi-baselines-cudnn", OWN_STACK}
    assert load_stack(OWN_STACK).shipped("tasp", LAYER, 8) is not None


def test_a_stack_without_a_kernel_on_an_accelerator_ships_nothing_there() -> None:
    """MagiAttention has kernels for NVIDIA alone, MindSpeed for Ascend alone, whose kernels are unknown here."""

    def on(schedule: str, accelerator: str) -> set[str]:
        return {stack.name for stack, _ in shipping(schedule, LAYER, 8, accelerator=accelerator)}

    assert on("direct-attention", "h100") == {"magi"}
    assert on("direct-attention", "mi300x") == set()
    assert "mindspeed" in on("ulysses", "") & on("ulysses", "ascend-910b")
    assert "mindspeed" not in on("ulysses", "h100")


def test_groups_of_names_fill_the_text() -> None:
    found = load_stack("megatron").shipped("usp:8x4", LAYER, 32)
    assert isinstance(found, Shipped)
    assert found.text.endswith("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 4")


def test_predictions_name_their_stack_and_the_sources_of_its_host() -> None:
    layer = Workload(2048, heads=8, mask="causal")
    found = predict("h800-8", "usp:4x2:zigzag-ring-attention", layer, stack="yunchang")
    assert found.to_dict()["stack"] == "yunchang"
    named = {each.name: each for each in found.provenance.constants if each.name.startswith("yunchang/usp")}
    assert named["yunchang/usp batch_s"].assumed
    assert found.provenance.inputs["machine"]["host"]["name"] == "yunchang/usp"  # type: ignore[index]
    assert "stack yunchang" in str(found)
    plain = predict("h800-8", "usp:4x2:zigzag-ring-attention", layer)
    assert plain.to_dict()["stack"] is None
    assert "host" not in plain.provenance.inputs["machine"]  # type: ignore[operator]
    assert plain[0].time_s < found[0].time_s


@pytest.mark.parametrize(
    ("machine", "settings", "words"),
    [
        ("h100-8", {}, "cudnn, measured on h100, which PyTorch 2.13.0 runs; NCCL 2.29; no host times"),
        ("b200-8", {}, "cudnn, measured on b200, which PyTorch 2.13.0 runs;"),
        ("mi300x-8", {}, "flash-attention-2-ck, measured on mi300x, in place of what PyTorch 2.13.0 runs; RCCL 2.27;"),
        ("h100-8", {"kernel": "flash-attention-3"}, "flash-attention-3, measured on h100, as named;"),
        ("h100-8", {"stack": "megatron"}, "which Megatron-LM with Transformer Engine d98e8a64, 2026-08-22"),
        ("h100-8", {"stack": "megatron"}, "host times assumed."),
        ("h100-8", {"stack": "ring-flash-attn"}, "host times partly measured."),
    ],
)
def test_answers_begin_with_the_software_and_what_of_it_was_measured(
    machine: str, settings: dict[str, Any], words: str
) -> None:
    found = predict(machine, "zigzag-ring-attention", LAYER, samples=0, **settings)
    assert words in str(found.parts()[0])
    ranked = compare(machine, LAYER, ["zigzag-ring-attention"], **settings)
    assert words in str(ranked.parts()[2])


def test_a_named_kernel_stays_with_the_host_of_the_stack() -> None:
    found = predict("h100-8", "zigzag-ring-attention", LAYER, stack="megatron", kernel="flash-attention-3")[0]
    assert found.rates["forward"].kernel == "flash-attention-3"
    assert found.machine is not None
    assert found.machine.host.name == "megatron/ring"
    of_stack = predict("h100-8", "zigzag-ring-attention", LAYER, stack="megatron")[0]
    assert of_stack.rates["forward"].kernel == "cudnn"


def test_another_kernel_keeps_the_passes_of_the_host() -> None:
    found = predict("h100-8", "zigzag-ring-attention", LAYER, stack="megatron")[0].machine
    assert found is not None
    assert isinstance(found.compute, KernelCompute)
    other = with_kernel(found, "flash-attention-3").compute
    assert isinstance(other, KernelCompute)
    assert other.passes == found.compute.passes != load_machine("h100-8").compute


def test_compare_ranks_what_the_stack_ships_with_a_host_for_each() -> None:
    found = compare("h100-8", LAYER, stack="megatron")
    names = {each.schedule for each in found.candidates if each.applies} | {each.schedule for each in found.settled}
    expected = {"zigzag-ring-attention", "kv-all-gather", "multi-ring-kv-all-gather", "ulysses", "usp:2x4", "usp:4x2"}
    assert names == expected
    hosts = {each.schedule: each.machine.host.name for each in found.candidates if each.machine is not None}
    assert hosts["zigzag-ring-attention"] == "megatron/ring"
    assert hosts["ulysses"] == "megatron/collectives"
    text = str(found)
    assert f"left out, as megatron does not run them for this layer: {found.left_out} schedules" in text
    assert "Megatron-LM with Transformer Engine: --context-parallel-size 8" in text
    assert "shipped by" not in text
    assert found.to_dict()["stack"] == "megatron"


def test_compare_without_a_stack_names_who_ships_each() -> None:
    rows = {row["schedule"]: row for row in compare("h100-8", LAYER, ["ulysses", "tasp"]).to_dict()["results"]}  # type: ignore[attr-defined]
    assert {"megatron", "trl", "deepspeed", "yunchang"} <= set(rows["ulysses"]["shipped_by"])
    assert rows["tasp"]["shipped_by"] == ["hamilton"], "MindSpeed has it for full masks alone"


def test_a_schedule_that_was_named_and_is_not_shipped_does_not_apply() -> None:
    found = compare("h100-8", LAYER, ["ulysses", "tasp"], stack="megatron")
    refused = {each.schedule: each.reason for each in found.candidates if not each.applies}
    assert refused == {"tasp": "the stack megatron does not ship tasp"}


@pytest.mark.parametrize(("stack", "passes"), [("hamilton", "both"), ("xdit", "forward")])
def test_a_stack_that_ships_nothing_for_a_layer_is_one_line(stack: str, passes: Any) -> None:
    with pytest.raises(TaspLabError, match=f"the stack {stack} runs"):
        compare("h100-8", LAYER, stack=stack, passes=passes)


def test_the_ranks_of_a_context_group_count_in_steps() -> None:
    """Llama 3 8B has 8 KV heads: Megatron's Ulysses takes 8 ranks, not 16; two groups have 8 each."""
    with pytest.raises(ScheduleError, match="KV heads are a multiple of 16"):
        predict_step("h100-2x8", "llama-3-8b", 16384, "ulysses", stack="megatron")
    layout = Layout(cp=8, dp=2)
    assert predict_step("h100-2x8", "llama-3-8b", 16384, "ulysses", stack="megatron", layout=layout).time_s > 0


@pytest.mark.parametrize("stack", ["magi", "vllm-omni"])
def test_the_fabric_has_the_kernel_of_the_stack_and_hosts_of_its_own(
    stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Machine] = []

    def validate(machine: Machine, **given: Any) -> None:
        asked.append(machine)
        raise ScheduleError("not run")

    monkeypatch.setattr(fabric_runs, "validate", validate)
    ranked = compare("h100-8", Workload(16384, heads=16, mask="full"), stack=stack)
    with pytest.raises(ScheduleError, match="not run"):
        fabric_runs.run_best(ranked, 1)
    kernel = ranked.best.rates["forward"].kernel
    assert run_by_stack(asked[0], LAYER, "ulysses").rate_of(LAYER, "forward").kernel == kernel
    assert asked[0].host == INSTANT_HOST
    assert not asked[0].stack


def test_steps_take_one_too() -> None:
    plain = predict_step("h100-8", "llama-3-8b", 16384, "zigzag-ring-attention", kernel="cudnn")
    of_stack = predict_step("h100-8", "llama-3-8b", 16384, "zigzag-ring-attention", stack="trl")
    assert of_stack.time_s > plain.time_s, "its host and its merges take time"
    offloading = predict_step("h100-8", "llama-3-8b", 16384, "ulysses", stack="megatron")
    assert "left out of the memory: --cpu-offloading-num-layers" in str(offloading)
    assert "left out of the memory" not in str(plain)
    with pytest.raises(ScheduleError, match="the stack trl does not ship tasp"):
        predict_step("h100-8", "llama-3-8b", 16384, "tasp", stack="trl")


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "kernels"),
    [
        (128, 16, ["aiter-asm", "aiter-asm-a16"]),
        (128, 2, ["aiter-asm", "flash-attention-2-ck"]),
        (64, 16, ["flash-attention-2-ck", "flash-attention-2-ck"]),
    ],
)
def test_aiter_takes_a_kernel_by_shape(head_dim: int, kv_heads: int, kernels: list[str]) -> None:
    layer = Workload(8192, heads=16, kv_heads=kv_heads, head_dim=head_dim)
    assert [rule.kernel for rule in load_stack("torch").rules("mi355x", layer)] == kernels
