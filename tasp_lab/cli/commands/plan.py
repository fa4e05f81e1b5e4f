"""``tasp-lab plan``: which layout of a training step is fastest, and which fits."""

from __future__ import annotations

from typing import Annotated

from tasp_lab.cli.console import Progress, tell
from tasp_lab.cli.options import (
    DEFAULT_STEP_MACHINE,
    RUN,
    WORK,
    Csv,
    Json,
    StepMachine,
    TopologyText,
    Wide,
    flag,
    of,
    quantity,
    whole,
)
from tasp_lab.core.choices import Checkpointing
from tasp_lab.core.files import check_writable


def plan(
    topology: TopologyText,
    /,
    *,
    model: Annotated[str, of(WORK)],
    seq: Annotated[str, quantity(WORK)],
    batch_tokens: Annotated[str, quantity(WORK)],
    schedule: Annotated[list[str] | None, flag(WORK, name="--schedule")] = None,
    checkpointing: Annotated[Checkpointing | None, of(WORK)] = None,
    logit_chunks: Annotated[int, whole(WORK)] = 1,
    offload: Annotated[bool, flag(WORK)] = False,
    setting: StepMachine = DEFAULT_STEP_MACHINE,
    simulations: Annotated[int, whole(RUN)] = 6,
    every: Annotated[bool, flag(RUN, name="--all")] = False,
    changes: Annotated[bool, of(RUN)] = True,
    jobs: Annotated[int | None, whole(RUN)] = None,
    csv: Csv = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Find the fastest layout of a training step that fits: tensor, context, pipeline and data parallelism.

    Example: tasp-lab plan h100-4x8 --model llama-3-70b --seq 512Ki --batch-tokens 4Mi

    Example: tasp-lab plan h100-32x8 --model llama-3-405b --seq 128Ki --batch-tokens 16Mi --no-changes

    Args:
        model: The model, such as llama-3-70b, or a model file.
        seq: Positions of a sequence: 8192 or 128Ki (131072).
        batch_tokens: Positions of a step over all sequences, such as 4Mi.
        schedule: Choose between these attention schedules; repeatable. Default: those that Megatron-Core or PyTorch
            ships.
        checkpointing: What the backward pass recomputes, see step. Default: all but offload are searched.
        logit_chunks: Parts in which logits are computed.
        offload: Keep optimizer states in the memory of the host.
        simulations: Maximum number of layouts that are simulated.
        every: Simulate all layouts that bounds do not exclude, however many.
        changes: Search again with more memory, faster NICs, another kernel, one node more.
        jobs: Worker processes. Default: the number of cores.
    """
    from tasp_lab.cli.outputs import write_rows
    from tasp_lab.core.process import usable_cores
    from tasp_lab.planning.plan import plan as plan_layouts

    if csv is not None:
        check_writable(csv)
    with Progress(lines_only=json) as shown:
        found = plan_layouts(
            model=model, sequence=seq, batch_tokens=batch_tokens, schedules=schedule, checkpointing=checkpointing,
            logit_chunks=logit_chunks, offload=offload, simulations=None if every else simulations, changes=changes,
            workers=usable_cores() if jobs is None else jobs, progress=shown.line, count=shown.count,
            **setting.settings(topology),
        )  # fmt: skip
    if csv is not None:
        write_rows(found.records(), csv)
    tell(found, json, wide=wide)
