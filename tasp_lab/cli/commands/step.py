"""``tasp-lab step``: a whole step of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    LAYER,
    PASSES,
    WORK,
    Contention,
    ExpressionNumbers,
    Json,
    Library,
    Overrides,
    TopologyText,
    quantity,
    whole,
)
from tasp_lab.core.choices import DEFAULT_BUFFERS, DEFAULT_STAGES, Checkpointing, MatrixDtype
from tasp_lab.core.progress import print_progress


def step(
    topology: TopologyText,
    /,
    *,
    model: Annotated[str, Parameter(group=WORK, help="The model, such as llama-3-8b, or a model file.")],
    seq: Annotated[str, quantity("Positions of a sequence: 8192 or 128Ki (131072).", WORK)],
    schedule: Annotated[
        str,
        Parameter(
            group=WORK,
            help="The attention schedule of each group of ranks, as in predict; of a hybrid such as lasp-2+ulysses.",
        ),
    ],
    batch: Annotated[int, whole("Sequences per group.", WORK)] = 1,
    group: Annotated[
        int | None,
        whole("Ranks that share a sequence. Default: all.", WORK),
    ] = None,
    passes: Annotated[
        Literal["both", "forward"],
        Parameter(
            name="--pass", group=WORK, help="both: a training step; forward: all layers once, without optimiser states."
        ),
    ] = "both",
    fsdp: Annotated[
        bool,
        Parameter(
            group=WORK,
            help="Shard parameters, gradients and optimiser states over all ranks; else data parallelism.",
        ),
    ] = True,
    checkpointing: Annotated[
        Checkpointing,
        Parameter(
            group=WORK,
            help="What the backward pass recomputes: nothing, a layer without its attention (selective), or all.",
        ),
    ] = "full",
    accumulate: Annotated[int, whole("Micro-batches per step.", WORK)] = 1,
    matrix_dtype: Annotated[
        MatrixDtype, Parameter(group=LAYER, help="Dtype of matrix products; attention is in bf16.")
    ] = "bf16",
    matrix_rate: Annotated[
        str | None,
        Parameter(
            group=LAYER,
            help="Rate of matrix products, such as timed:600TFLOP/s. Default: that of the accelerator.",
            show_default=False,
        ),
    ] = None,
    compute: Annotated[
        str | None,
        Parameter(group=LAYER, help="Compute rate of attention, such as timed:300TFLOP/s.", show_default=False),
    ] = None,
    kernel: Annotated[
        str | None,
        Parameter(group=LAYER, help="Kernel model of attention, such as flash-attention-3.", show_default=False),
    ] = None,
    buffers: Annotated[int, whole("Receive buffers of a rank, as in predict.", PASSES)] = DEFAULT_BUFFERS,
    stages: Annotated[int, whole("Parts in which the keys of direct-attention arrive.", PASSES)] = DEFAULT_STAGES,
    numbers: ExpressionNumbers = DEFAULT_NUMBERS,
    overrides: Overrides = (),
    library: Library = "auto",
    contention: Contention = None,
    json: Json = False,
) -> None:
    """Predict a whole step of a model: time, tokens per second, MFU and GPU memory. Less checked than layers.

    Example: tasp-lab step h100-8 --model llama-3-8b --seq 128Ki --schedule tasp

    Example: tasp-lab step h100-2x8 --model qwen3-8b --seq 64Ki --schedule ulysses --group 8 --checkpointing none

    Example: tasp-lab step mi300x-8 --model llama-3-8b --seq 32Ki --schedule ulysses --no-fsdp --accumulate 4
    """
    from tasp_lab.core.units import parse_count
    from tasp_lab.prediction.predict_step import predict_step
    from tasp_lab.schedules.attention.options import AttentionOptions

    with limited_memory():
        found = predict_step(
            numbers.load(topology, library),
            model,
            parse_count(seq, "sequence"),
            schedule,
            batch=batch,
            group=group,
            passes=passes,
            fsdp=fsdp,
            checkpointing=checkpointing,
            accumulate=accumulate,
            matrix_dtype=matrix_dtype,
            matrix_rate=matrix_rate,
            options=AttentionOptions(buffers=buffers, stages=stages),
            compute=compute,
            kernel=kernel,
            overrides=overrides,
            contention=None if contention is None else contention == "on",
            progress=print_progress,
        )
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
