"""Memory laws, rates with sources, and messages of states against what NCCL's rings take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from sim.simulate import simulate
from tasp_lab import predict_step
from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import accelerator_names
from tasp_lab.machines.kernel_model.catalogue import gpu_alias
from tasp_lab.machines.kernel_model.constants import gpus
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.training_step.costs import (
    EAGER,
    FUSED,
    before_attention,
    behind_projection,
    kept,
    kinds_of,
    repeated_selectively,
)
from tasp_lab.prediction.training_step.layout import StepPlan
from tasp_lab.prediction.training_step.memory import attention_buffers, memory_use, stage_memory
from tasp_lab.prediction.training_step.messages import all_reduce, gather, reduce_scatter
from tasp_lab.prediction.training_step.rates import (
    RESERVED_BYTES,
    RESERVED_SOURCE,
    _accelerators,
    step_rates,
    with_memory,
)
from tasp_lab.schedules.build import collective
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.parameters import attention_matrices, mlp_matrices, parameter_count
from tests.support.steps import exact_machine, phases_of, plan_of, small_model

STATES = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_stages_shard_states_over_the_ranks(ranks: int, zero: int) -> None:
    """16 bits to compute with; 32 for gradients, master copies and each of two moments (arXiv:1910.02054, figure 1)."""
    plan = plan_of(load_model("llama-3-8b"), 1024, ranks=ranks, zero=zero)
    memory, parameters = stage_memory(plan, 0, 1024, 0), parameter_count(plan.model)
    expected = {
        0: (2, 4, 12),
        1: (2, 4, 12 / ranks),
        2: (2, 4 / ranks, 12 / ranks),
        3: (4 / ranks, 4 / ranks, 8 / ranks),
    }
    for name, each in zip(STATES, expected[zero], strict=True):
        assert getattr(memory, name) == pytest.approx(each * parameters, abs=1)
    offloaded = stage_memory(replace(plan, layout=replace(plan.layout, offload=True)), 0, 1024, 0)
    assert offloaded == memory._replace(optimizer=0)


def test_memory_of_stages_and_tensor_groups_adds_up() -> None:
    """Parameters of all stages and tensor ranks are those of the model, and the items are all there is."""
    model = load_model("llama-3-8b")
    whole = plan_of(model, 1024, ranks=1, zero=0)
    split = plan_of(model, 1024, ranks=16, zero=0, tp=4, pp=4, cp=1)
    parts = [stage_memory(split, stage, 1024, 0) for stage in range(4)]
    assert 4 * sum(each.parameters for each in parts) == stage_memory(whole, 0, 1024, 0).parameters
    assert [each.logits > 0 for each in parts] == [False, False, False, True]
    assert all(each.total == sum(each._asdict().values()) for each in parts)


def test_micro_batches_under_way_are_in_memory() -> None:
    """Of four stages the first keeps four micro-batches, the last one (arXiv:2104.04473, figure 4).

    Each is the inputs of 8 layers; the last stage also keeps those of the last norm and of the output.
    """
    plan = plan_of(load_model("llama-3-8b"), 1024, ranks=4, pp=4, cp=1, microbatches=8)
    first, *_, last = (stage_memory(plan, stage, 1024, 0).saved_activations for stage in range(4))
    assert (first, last) == (4 * 8 * 1024 * 2 * 4096, (8 + 2) * 1024 * 2 * 4096)
    chunked = replace(plan, layout=replace(plan.layout, logit_chunks=8))
    assert 8 * stage_memory(chunked, 3, 1024, 0).logits == stage_memory(plan, 3, 1024, 0).logits


def test_checkpointing_keeps_less() -> None:
    found = {
        checkpointing: stage_memory(plan_of(small_model(20), checkpointing=checkpointing), 0, 32, 0)
        for checkpointing in ("none", "selective", "full", "offload")
    }
    kept = [each.saved_activations + each.recomputed_activations for each in found.values()]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert len({tuple(getattr(each, name) for name in STATES) for each in found.values()}) == 1


def test_layer_inputs_on_the_host_leave_buffers_for_two() -> None:
    """By hand: two hidden states of 12 numbers in 16 bits for 32 positions, of 20 layers and two micro-batches."""
    plan = plan_of(small_model(20), checkpointing="offload", ranks=4, pp=2, cp=2, microbatches=4)
    assert stage_memory(plan, 0, 32, 0).saved_activations == 2 * 32 * 2 * 12


def test_offload_moves_shards_of_fsdp_where_the_software_does() -> None:
    """PyTorch's CPUOffloadPolicy; Megatron-LM and DeepSpeed offload optimizer states alone."""
    plan = plan_of(small_model(), offload=True, software=load_stack("trl").step)
    states = [getattr(stage_memory(plan, 0, 32, 0), name) for name in STATES]
    assert states == [0, 0, 0]
    sharded = replace(plan, layout=replace(plan.layout, zero=2))
    assert stage_memory(sharded, 0, 32, 0).parameters > 0


def test_activations_of_llama_are_those_counted_by_hand() -> None:
    """A token of one layer, no checkpointing: 4 hidden states, Q, K, V, results, two MLP vectors and their product in
    16 bits, and a log-sum-exp per head in 32; behind the layers two hidden states. As the backward pass begins there is
    the gradient of one hidden state.
    """
    plan = plan_of(load_model("llama-3-8b"), 1024, checkpointing="none")
    use = memory_use(plan, 0, 512)
    layer = 2 * (4 * 4096 + 4096 + 2 * 1024 + 4096 + 3 * 14336) + 4 * 32
    assert (use.saved_activations, use.recomputed_activations) == (512 * (32 * layer + 2 * 2 * 4096), 0)
    assert (use.logits, use.activation_gradients) == (512 * 128256 * 12, 512 * 2 * 4096)


@pytest.mark.parametrize("schedule", ["ulysses", "staged-ulysses", "usp:2x2"])
def test_results_that_are_returned_are_kept_twice(schedule: str) -> None:
    """By hand: 4096 results of a token in 16 bits, as computed and as they arrived, in each of 32 layers."""
    ring, other = (
        stage_memory(plan_of(load_model("llama-3-8b"), 1024, name, 4, checkpointing="none"), 0, 256, 0)
        for name in ("zigzag-ring-attention", schedule)
    )
    assert other == ring._replace(saved_activations=ring.saved_activations + 256 * 32 * 2 * 4096)
    alone = (plan_of(load_model("llama-3-8b"), 1024, name, 1) for name in ("zigzag-ring-attention", "ulysses"))
    assert len({stage_memory(plan, 0, 1024, 0) for plan in alone}) == 1


def test_within_a_layer_gradients_of_the_mlp_stand_beside_what_is_recomputed() -> None:
    """By hand, a token of Llama 3 8B in a stage without output: a hidden state and two MLP vectors in 16 bits."""
    plan = plan_of(load_model("llama-3-8b"), 1024, ranks=4, pp=4, cp=1)
    use = stage_memory(plan, 0, 1024, 7)
    assert use.activation_gradients == 1024 * 2 * (4096 + 2 * 14336)
    assert use.recomputed_activations == 1024 * (2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32)
    assert (use.logits, use.attention_buffers) == (0, 7)


def test_a_peak_is_of_one_moment() -> None:
    """Where the backward pass begins, nothing is recomputed and attention is over; within a layer logits are gone."""
    plan = plan_of(load_model("llama-3-8b"), 1024, ranks=1)
    at_output, in_layer = stage_memory(plan, 0, 1024, 7), stage_memory(plan, 0, 1024, 10**12)
    assert (at_output.logits > 0, at_output.recomputed_activations, at_output.attention_buffers) == (True, 0, 0)
    assert (in_layer.logits, in_layer.recomputed_activations > 0, in_layer.attention_buffers) == (0, True, 10**12)


def megatron_plan(sequence: int = 4096, schedule: str = "ulysses", **degrees: int) -> StepPlan:
    """12 layers of Llama 3 70B on 8 GPUs, a distributed optimizer, nothing recomputed."""
    model = structs.replace(load_model("llama-3-70b"), layers=12)
    rules = load_stack("megatron").step
    return plan_of(
        model, sequence, schedule, 8, zero=1, checkpointing="none", microbatches=4, software=rules, **degrees
    )


def test_megatron_keeps_dummy_gradients_and_logits_in_16_bits() -> None:
    """By hand: a tensor in 16 bits per matrix of a layer, QKV, output, both halves of the MLP and its end; and of the
    output matrix where it is.
    """
    layer = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 8192 * 2 * 28672 + 28672 * 8192
    first, last = (stage_memory(megatron_plan(tp=2, pp=2, cp=1, dp=2), stage, 4096, 0) for stage in (0, 1))
    assert (first.dummy_gradients, last.dummy_gradients) == (2 * layer // 2, 2 * (layer + 128256 * 8192) // 2)
    alone = stage_memory(megatron_plan(tp=8, pp=1, cp=1), 0, 4096, 0)
    assert alone.logits == 4096 * 128256 * 2 // 8


@pytest.mark.parametrize(
    ("measured_gib", "sequence", "degrees"),
    [
        (66.55, 4096, {"tp": 1, "pp": 2, "cp": 1, "dp": 4}),
        (60.68, 4096, {"tp": 2, "cp": 1, "dp": 4}),
        (39.07, 4096, {"tp": 4, "cp": 1, "dp": 2}),
        (28.29, 4096, {"tp": 8, "cp": 1, "dp": 1}),
        (68.43, 32768, {"tp": 2, "cp": 4, "dp": 1}),
        (104.51, 32768, {"tp": 1, "cp": 8, "dp": 1}),
        (112.67, 131072, {"tp": 2, "cp": 4, "dp": 1}),
        (147.99, 131072, {"tp": 1, "cp": 8, "dp": 1}),
    ],
)
def test_peaks_of_megatron_are_met(measured_gib: float, sequence: int, degrees: dict[str, int]) -> None:
    """Megatron-LM 23e00ed with Transformer Engine 2.11 on 8 B200, peak of what is allocated: within 0.5 %.

    MooreThreads/SimuMax 4dcaae5, docs/b200/b200_release_v1.2_summary.md.
    """
    plan = megatron_plan(sequence, **degrees)
    use = memory_use(plan, 0, sequence // (plan.layout.cp or 1))
    assert use.total / 2**30 == pytest.approx(measured_gib, rel=0.005)


def test_selective_checkpointing_keeps_what_torchtitan_keeps() -> None:
    """By hand, a token of a layer of Llama 3 8B in 16 bits: the input, results of attention, and of the products of
    queries, values and the gate; those of keys, output and the second half of the MLP are computed again.
    """
    kind = kinds_of(load_model("llama-3-8b"))[0]
    plan = plan_of(load_model("llama-3-8b"), 1024, ranks=2, pp=2, cp=1, checkpointing="selective")
    use = stage_memory(plan, 0, 512, 0)
    assert use.saved_activations == 512 * 16 * (2 * (4096 + 4096 + 4096 + 1024 + 14336) + 4 * 32)
    again = [each.flops for each in repeated_selectively(plan.model, kind).matrices]
    assert again == [2 * 4096 * 1024, 2 * 4096 * 14336, 2 * 4096 * 4096]


def test_eager_work_moves_what_its_operations_read_and_write() -> None:
    """Bytes per element of each operation: a norm in float32, rotary positions by two products and a sum, SiLU."""
    norm = [2 + 4, 4 + 4, 4, 4 + 4, 4 + 2, 2 + 2]
    rotary, silu = [2 + 2, 1 + 1, 2 + 2, 2 + 2, 4 + 2], [2 + 2, 4 + 2]
    assert (EAGER.norm, EAGER.rotary, EAGER.gated) == (sum(norm), sum(rotary), sum(silu))
    assert EAGER.residual_norm == EAGER.residual + EAGER.norm
    assert (EAGER.before, EAGER.behind) == (len(norm) + 2 * len(rotary), len(norm) + len(silu) + 2)
    model = load_model("llama-3-8b")
    (kind,) = set(kinds_of(model))
    fused, eager = (
        before_attention(model, kind, work).plus(behind_projection(model, kind, work)) for work in (FUSED, EAGER)
    )
    assert fused.moved_bytes == 2 * (2 + 4 + 3) * 4096 + 4 * 40 * 128 + 6 * 14336
    assert eager.moved_bytes == (2 * 36 + 2 * 6) * 4096 + 20 * 40 * 128 + 10 * 14336
    assert eager.flops == fused.flops


def test_eager_steps_take_longer_and_say_so() -> None:
    steps = [predict_step("h100-8", "llama-3-8b", 32768, "ulysses", fused=fused) for fused in (True, False)]
    assert steps[0].time_s < steps[1].time_s < 1.3 * steps[0].time_s
    assert [each.to_dict()["fused"] for each in steps] == [True, False]
    assert [", eager" in str(each) for each in steps] == [False, True]
    assert not predict_step("h100-8", "llama-3-8b", 32768, "ulysses", stack="trl").plan.software.fused


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "glm-4.5-air", "qwen3-8b"])
def test_selective_checkpointing_repeats_what_it_does_not_keep(name: str) -> None:
    """Products kept and repeated are all but the last of an MLP; experts are repeated."""
    model = load_model(name)
    for kind in set(kinds_of(model)):
        shapes = [*attention_matrices(model, kind.letter), *(mlp_matrices(model)[:-1] if kind.experts is None else ())]
        rest = behind_projection(model, kind).flops if kind.experts is not None else 0
        repeated = sum(2 * inputs * outputs for inputs, outputs in shapes[1::2]) + rest
        assert repeated_selectively(model, kind).flops == repeated
        assert kept(model, kind) == sum(outputs for _, outputs in shapes[::2])


@pytest.mark.parametrize("ranks", [3, 5, 7, 11])
def test_shards_are_as_small_as_they_can_be_and_cover_all_states(ranks: int) -> None:
    model = small_model()
    found = memory_use(plan_of(model, ranks=ranks), 0, 1)
    for size, of_parameter in ((found.parameters, 4), (found.gradients, 4), (found.optimizer, 8)):
        assert size == -(-of_parameter * parameter_count(model) // ranks)


def test_memory_grows_with_the_positions_of_a_rank() -> None:
    plan = plan_of(small_model())
    assert attention_buffers(phases_of(plan, exact_machine(2)).passes.values()) > 0
    one, two = (memory_use(plan, 0, tokens) for tokens in (16, 32))
    grow = ("saved_activations", "recomputed_activations", "activation_gradients", "logits")
    assert two == one._replace(**{name: 2 * getattr(one, name) for name in grow})


@pytest.mark.parametrize("name", sorted(_accelerators()))
def test_every_accelerator_has_rates_below_its_peak_and_sources(name: str) -> None:
    record = _accelerators()[name]
    assert name in accelerator_names() or gpu_alias(name) in gpus()
    for number in (record.bf16, *([record.fp8] if record.fp8 else [])):
        assert number.source.startswith(("measured: ", "assumed: ", "NVIDIA", "AMD", "Intel"))
    if gpu_alias(name) in gpus():
        peak = gpus()[gpu_alias(name)].peak_flops.value
        assert float(record.bf16.value.removesuffix("TFLOP/s")) * 1e12 <= peak
        if record.fp8:
            assert float(record.fp8.value.removesuffix("TFLOP/s")) * 1e12 <= 2 * peak


@pytest.mark.parametrize("name", sorted(_accelerators()))
def test_memory_is_what_a_driver_reports(name: str) -> None:
    """In MiB, from the tool of the driver; never the decimal number of a data sheet taken for bytes."""
    memory = _accelerators()[name].memory
    if name.startswith(("tpu", "trainium", "ascend")):  # whose tools were not seen
        assert memory.source.startswith(("HBM capacity", "AWS Neuron documentation", "assumed: "))
        return
    assert memory.value.endswith("MiB")
    assert memory.source.startswith(("nvidia-smi: ", "rocm-smi: ", "hl-smi: ", "assumed: "))


@pytest.mark.parametrize(
    ("machine", "mebibytes"),
    [("h100-8", 81_559), ("h200-8", 143_771), ("a100-8", 81_920), ("b200-8", 183_359), ("mi300x-8", 196_592)],
)
def test_what_the_driver_reports_less_the_reserve_fits(machine: str, mebibytes: int) -> None:
    rates = step_rates(load_machine(machine))
    assert rates.capacity_bytes == mebibytes * 2**20
    assert 2**30 <= RESERVED_BYTES <= 4 * 2**30
    assert RESERVED_SOURCE.startswith("assumed: ")
    usable = mebibytes * 2**20 - RESERVED_BYTES
    assert (rates.holds(usable), rates.holds(usable + 1)) == (True, False)


def test_a_step_that_fits_between_data_sheet_and_driver_fits() -> None:
    """8,030,261,248 parameters over 8 H100: a sequence whose step takes more than 80e9 bytes, less than 79.65 GiB."""
    found = predict_step("h100-8", "llama-3-8b", 260 * 1024, "ulysses")
    assert 80e9 < found.memory.total < 81_559 * 2**20 - RESERVED_BYTES
    assert found.fits
    constants = {each.name: each for each in found.provenance.constants}
    assert constants["memory_reserved"].assumed
    assert constants["memory"].source.startswith("nvidia-smi: ")


@pytest.mark.parametrize("name", accelerator_names())
def test_no_accelerator_of_the_catalogue_is_missing(name: str) -> None:
    assert name in _accelerators()


def test_the_memory_of_a_gpu_can_be_overridden() -> None:
    found = predict_step("h100-8", "llama-3-8b", 131072, "ulysses", overrides=["gpu.memory=40GiB"])
    assert found.rates.capacity_bytes == 40 * 2**30
    assert found.fits is (found.memory.total <= 40 * 2**30 - RESERVED_BYTES)
    rates = step_rates(load_machine("h100-8"))
    assert with_memory(rates, ["gpu.memory=x1/2"]).capacity_bytes == 81_559 * 2**19
    assert with_memory(rates, ["nic.bandwidth=x2"]) == rates
    unknown = step_rates(load_machine("full-mesh:2"))
    assert with_memory(unknown, ["gpu.memory=1GiB"]).holds(2**30) is False
    with pytest.raises(OverrideError, match="the memory of a GPU is unknown, expected a size like 80GiB"):
        with_memory(unknown, ["gpu.memory=x2"])
    with pytest.raises(OverrideError, match=r"override gpu\.memory=forty"):
        with_memory(rates, ["gpu.memory=forty"])


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    found = predict_step("h100-8", "llama-3-8b", 65536, "zigzag-ring-attention", layers=2)
    longest = found.longest_sequence
    assert longest
    assert longest % 1024 == 0
    fits = [predict_step("h100-8", "llama-3-8b", sequence, "zigzag-ring-attention", layers=2).fits
            for sequence in (longest, longest + 1024)]  # fmt: skip
    assert fits == [True, False]
    assert predict_step("full-mesh:2", "llama-3-8b", 1024, "ulysses", layers=2).longest_sequence is None
    tiny = predict_step("h100-8", "llama-3-70b", 1024, "ulysses", layers=2, overrides=["gpu.memory=10GiB"])
    assert (tiny.fits, tiny.longest_sequence) == (False, 0)


def test_rates_that_are_refused() -> None:
    with pytest.raises(QuantityError, match=r"expected at most its peak of 989\.4 TFLOP/s"):
        step_rates(load_machine("h100-8"), given=1e15)
    with pytest.raises(QuantityError, match="matrices in fp8 on a100-8, whose rate is unknown"):
        step_rates(load_machine("a100-8"), "fp8")
    assert step_rates(load_machine("full-mesh:2")).matrices.assumed
    assert step_rates(load_machine("full-mesh:2")).capacity_bytes is None


@pytest.mark.parametrize("name", ["h100-8", "h100-2x8", "mi300x-8", "h100-4x8"])
@pytest.mark.parametrize("shard_bytes", [2**22, 2**26])
def test_gathers_take_about_as_long_as_those_of_the_library(name: str, shard_bytes: int) -> None:
    """Straight messages stand for NCCL's and RCCL's rings: within 15 % on these machines."""
    machine = load_machine(name)
    total = shard_bytes * machine.topology.world_size
    ours, rings = (
        float(simulate(schedule, machine, events=False).time_s)
        for schedule in (gather(machine.topology, total), collective("library-ring", machine.topology, shard_bytes))
    )
    assert ours == pytest.approx(rings, rel=0.15)


def test_a_reduction_takes_as_long_as_a_gather_and_both_make_an_all_reduce() -> None:
    machine = exact_machine(4)
    times = [simulate(build(machine.topology, 4000), machine).time_s for build in (gather, reduce_scatter, all_reduce)]
    assert times[0] == times[1]
    assert times[2] == 2 * times[0]
