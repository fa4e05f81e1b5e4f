"""The flags of a layout in libraries that train with it: Megatron-Core, NeMo (Megatron Bridge) and torchtitan.

    for each in flags_of(step.plan, sequences=8):
        print(each.library, each.text)

Facts about flags were read in the sources named by `VERSIONS`; what a library lacks is stated in the text.
"""

from __future__ import annotations

from typing import NamedTuple

from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.training_step.layout import StepPlan

MEGATRON, NEMO, TORCHTITAN = "Megatron-Core", "NeMo", "torchtitan"

VERSIONS = {
    MEGATRON: "NVIDIA/Megatron-LM d98e8a64, 2026-08-22: megatron/training/arguments.py, "
    "megatron/core/model_parallel_config.py, megatron/core/transformer/transformer_config.py",
    NEMO: "NVIDIA-NeMo/Megatron-Bridge 067f987d, 2026-08-22: docs/parallelisms.md, "
    "docs/training/activation-recomputation.md",
    TORCHTITAN: "pytorch/torchtitan b5bcd76c, 2026-08-21: torchtitan/config/configs.py, "
    "torchtitan/distributed/activation_checkpoint.py",
}
"""What was read, by library."""


_STACKS = ("megatron", "torchtitan")


class Flags(NamedTuple):
    """The flags of a library, and the version that was read."""

    library: str
    text: str
    source: str


def flags_of(plan: StepPlan, sequences: int) -> list[Flags]:
    """The flags of each library.

    Parameters
    ----------
    plan : the layout, and the attention schedule of each context group.
    sequences : of a step, over all data-parallel groups.
    """
    layout, schedule = plan.layout, plan.schedule
    assert layout.cp is not None, "a plan has all degrees"
    lacks = f"; it does not ship {schedule}"
    context, titan = (load_stack(name).shipped(schedule, plan.windowed_layer, layout.cp, "both") for name in _STACKS)
    megatron = _megatron(plan, context.text if context is not None and layout.cp > 1 else "", sequences)
    missing, titan_missing = ("" if layout.cp == 1 or how else lacks for how in (context, titan))
    texts = {
        MEGATRON: " ".join(f"--{name} {value}".rstrip() for name, value in megatron) + missing,
        NEMO: _keywords(megatron) + missing,
        TORCHTITAN: _torchtitan(plan, sequences) + titan_missing,
    }
    return [Flags(library, text, VERSIONS[library]) for library, text in texts.items()]


_Option = tuple[str, str]
"""A flag of Megatron with its value, empty for a switch."""


def _megatron(plan: StepPlan, context: str, sequences: int) -> list[_Option]:
    layout, found = plan.layout, list[_Option]()
    cp = layout.cp or 1
    if layout.tp > 1:
        found += [("tensor-model-parallel-size", str(layout.tp)), ("sequence-parallel", "")]
    if cp > 1:
        words = context or f"--context-parallel-size {cp}"
        found += [(name, value) for name, _, value in (each.strip().partition(" ") for each in words.split("--")[1:])]
    if layout.pp > 1:
        found.append(("pipeline-model-parallel-size", str(layout.pp)))
        if layout.interleave > 1:
            found.append(("num-virtual-stages-per-pipeline-rank", str(layout.interleave)))
    if layout.ep > 1:
        found.append(("expert-model-parallel-size", str(layout.ep)))
    found += [("micro-batch-size", str(plan.batch)), ("global-batch-size", str(sequences))]
    found.append(("seq-length", str(plan.sequence)))
    if layout.zero == 3:
        found += [("use-megatron-fsdp", ""), ("data-parallel-sharding-strategy", "optim_grads_params")]
    elif layout.zero:
        found.append(("use-distributed-optimizer", ""))
        if layout.overlap is not False and (layout.dp or 1) * cp > 1:
            found += [("overlap-grad-reduce", ""), ("overlap-param-gather", "")]
    if layout.offload:
        found.append(("optimizer-cpu-offload", ""))
    if layout.repeats_layers:  # of offload the nearest: Megatron recomputes a layer or offloads it, not both
        found += [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", "1")]
    elif layout.checkpointing == "selective":  # nearest: projections of attention are kept, too
        found += [("recompute-granularity", "selective"), ("recompute-modules", "layernorm mlp")]
    return found


_NEMO_NAMES = {"num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size"}
_NEMO_LISTS = ("recompute-modules", "hierarchical-context-parallel-sizes")


def _keywords(options: list[_Option]) -> str:
    """The same as keywords of the configuration of NeMo's Megatron Bridge, whose fields are those of Megatron-Core."""
    shown = []
    for name, value in options:
        keyword = _NEMO_NAMES.get(name, name.replace("-", "_"))
        words = [each if each.isdigit() else f'"{each}"' for each in value.split()]
        listed = f"[{', '.join(words)}]" if name in _NEMO_LISTS else ", ".join(words)
        shown.append(f"{keyword}={listed or 'True'}")
    return ", ".join(shown)


def _torchtitan(plan: StepPlan, sequences: int) -> str:
    layout, sequence = plan.layout, plan.sequence
    options: list[tuple[str, object, bool]] = [
        ("parallelism.tensor_parallel_degree", layout.tp, layout.tp > 1),
        ("parallelism.context_parallel_degree", layout.cp, layout.cp != 1),
        ("parallelism.pipeline_parallel_degree", layout.pp, layout.pp > 1),
        ("parallelism.pipeline_parallel_schedule", "Interleaved1F1B", layout.pp > 1 and layout.interleave > 1),
        ("parallelism.num_pp_microbatches", layout.microbatches, layout.pp > 1),
        ("parallelism.data_parallel_shard_degree", layout.dp if layout.zero == 3 else 1, True),
        ("parallelism.data_parallel_replicate_degree", layout.dp, layout.zero < 3 and layout.dp != 1),
        ("training.max_context_length", sequence, True),
        ("training.num_tokens_per_microbatch_per_dp_rank", plan.batch * sequence, True),
        ("training.num_tokens_per_train_step", sequences * sequence, True),
    ]
    options.append(("training.enable_cpu_offload", "", layout.offload))
    found = " ".join(f"--{name} {value}".rstrip() for name, value, applies in options if applies)
    config = {"selective": "SelectiveAC", "none": ""}.get(layout.checkpointing, "FullAC")
    return found + (f", activation_checkpoint={config}.Config()" if config else "")
