"""Steps 2, 3 and 8: results against float64, bits under random delays, and training against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from runtime.executor.transports import TRANSPORTS, make_transport
from runtime.gpu_check.delays import DelayedRuns
from runtime.gpu_check.kernels import check_kernels, check_linear_kernels
from runtime.gpu_check.training import (
    Recipe,
    Trained,
    difference_learnt,
    difference_of_losses,
    grows_after,
    train_alone,
    train_together,
)
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, layer_names_on
from tasp_lab.validation.gpu_check.steps import NEEDS_GPU, Context, Outcome
from tasp_lab.workload.layer import Work, Workload

BOTH = AttentionOptions("both")
TRANSPORT_S = 120.0

NEVER_RUN = "symmetric-memory"
"""Left out until it has run on GPUs: what fails in it would end the check for all others."""


def check_all_kernels(context: Context) -> Outcome:
    """Step 2, on every rank's own device."""
    device, sizes = context.group.device, context.sizes
    kernels = [each._asdict() for each in check_kernels(device, sizes.kernel_rows, sizes.head_dims)]
    return Outcome({"kernels": kernels, "linear_attention": check_linear_kernels(device, sizes.kernel_rows)})


def check_schedules(context: Context) -> Outcome:
    """Step 3: every schedule that applies to this machine, over every transport, with and without delays."""
    group = context.group
    unapplied: list[dict[str, object]] = []
    runs, schedules = 0, 0
    transports = [name for name in TRANSPORTS if name not in ("p2p" if group.on_gpu else "", NEVER_RUN)]
    for name, schedule in all_schedules(context, unapplied):
        context.progress(f"{name}: {schedule.transfers} transfers over {' and '.join(transports)}")
        schedules += 1
        for transport in transports:
            made = DelayedRuns(group, schedule, make_transport(transport, TRANSPORT_S, device=group.device))
            for seed in (None, *range(context.sizes.seeds)):
                try:
                    made.run(seed)
                except RunError as error:
                    how = "without delays" if seed is None else f"with random delays, seed {seed}"
                    raise RunError(f"{name} over {transport}, {how}: {error}") from None
                runs += 1
    return Outcome(
        {"schedules": schedules, "transports": transports, "runs": runs, "do_not_apply": unapplied or "none"}
    )  # fmt: skip


def all_schedules(context: Context, unapplied: list[dict[str, object]]) -> Iterator[tuple[str, Schedule]]:
    """All schedules by name, both passes of layers; the reasons of those that do not apply are added to a list."""
    for name, work in _names(context):
        options = BOTH if isinstance(work, Workload) else AttentionOptions()
        try:
            built = build_schedules(name, context.machine.topology, work, options=options)
        except TaspLabError as error:
            unapplied.append({"schedule": name, "reason": str(error)})
            continue
        yield from ((f"{name} ({mask_of(work)})" if mask_of(work) else name, each) for each in built)


def mask_of(work: Work) -> str:
    """The mask of a layer; empty for a collective."""
    return work.mask if isinstance(work, Workload) else ""


def _names(context: Context) -> Iterator[tuple[str, Work]]:
    n, sizes = context.group.world_size, context.sizes
    yield from ((name, sizes.delayed_bytes) for name in COLLECTIVES)
    for mask in sizes.delayed_masks:
        layer = _layer(context, mask)
        yield from ((name, layer) for name in layer_names_on(n, layer))
    linear = _layer(context, "causal", linear=True)
    yield from ((name, linear) for name in layer_names_on(n, linear))


def _layer(context: Context, mask: str, linear: bool = False) -> Workload:
    """A layer whose shards of keys and values have about the size of the collectives' blocks.

    Its heads can be shared out among the ranks.
    """
    n, head_dim = context.group.world_size, 64 if context.group.on_gpu else 8
    per_rank = max(16, context.sizes.delayed_bytes // (4 * n * head_dim))
    layer = Workload(n * per_rank, heads=2 * n, kv_heads=n, head_dim=head_dim, dtype="bf16", mask=mask)
    return replace(layer, kind="linear", decay="head") if linear else layer


LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}
"""Largest relative differences of a loss, and of what the weights before attention have learnt in all steps.

Sums are taken in another order, and in bf16 attention and its gradients are rounded.
"""

SETTLED_STEP = 3
"""From this step on the reserved memory must not grow."""


def check_training(context: Context) -> Outcome:
    """Step 8: the same model trained on all ranks and by this rank alone."""
    sizes = context.sizes
    recipe = Recipe(
        sizes.training_sequence, sizes.training_heads, sizes.training_head_dim, steps=sizes.training_steps
    )  # fmt: skip
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    for dtype in LIMITS:
        together = train_together(recipe, dtype, context.group.device)
        alone = train_alone(recipe, dtype, context.group.device)
        rows.append(_training_row(context, dtype, together, alone))
        failures += _training_failures(dtype, together, alone)
    return Outcome({"training": rows, "losses": list(together.losses)}, failure="; ".join(failures))


def _training_row(context: Context, dtype: str, together: Trained, alone: Trained) -> dict[str, object]:
    loss_limit, learnt_limit = LIMITS[dtype]
    return {
        "dtype": dtype,
        "first_loss": together.losses[0],
        "last_loss": together.losses[-1],
        "loss_difference": difference_of_losses(together, alone),
        "loss_limit": loss_limit,
        "learnt_difference": difference_learnt(together, alone),
        "learnt_limit": learnt_limit,
        "reserved_bytes": together.reserved_bytes[-1] if context.group.on_gpu else NEEDS_GPU,
    }


def _training_failures(dtype: str, together: Trained, alone: Trained) -> list[str]:
    (loss_limit, learnt_limit), found = LIMITS[dtype], []
    loss, learnt = difference_of_losses(together, alone), difference_learnt(together, alone)
    if not loss <= loss_limit:
        found.append(f"{dtype}: losses differ by {loss:.2g}, expected at most {loss_limit:g}")
    if not learnt <= learnt_limit:
        found.append(f"{dtype}: gradients through attention differ by {learnt:.2g}, expected at most {learnt_limit:g}")
    if grown := grows_after(together.reserved_bytes, SETTLED_STEP):
        found.append(f"{dtype}: reserved memory grew by {grown} bytes after step {SETTLED_STEP}")
    return found
