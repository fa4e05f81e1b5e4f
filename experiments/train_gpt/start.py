"""Checkpoints, and the check of options on all ranks before training starts: an error or mismatch raises on all.

A checkpoint is one file with the complete training state, independent of the number of ranks and the schedule.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.train_gpt.options import Recipe, RunOptions
from runtime.sequence_parallel import agreement
from runtime.sequence_parallel.agreement import Proposal
from tasp_lab.core.errors import OutputError, RunError, TaspLabError, WorkloadError, first_line
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.topology.builders import full_mesh

TIMEOUT_S = 120.0

FILE = "checkpoint.pt"
_PARTS = {"decisive", "step", "model", "optimizer", "random"}

State = dict[str, Any]
"""`decisive`: the options that determine the losses; `step`: completed steps; `model`, `optimizer`: torch's state
dicts; `random`: state of the generator that draws sequences."""


class CheckpointError(TaspLabError):
    """A checkpoint that cannot be read or belongs to another run. The message names the file."""


def save(folder: Path, state: State) -> None:
    """Replace the checkpoint of a folder atomically. Raises `OutputError`."""
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(folder / FILE, content.getvalue())


def load(folder: Path, decisive: Mapping[str, object]) -> State:
    """The checkpoint of a folder. Raises `CheckpointError` if it was made with other options."""
    file = folder / FILE
    state = _read_checkpoint(file)
    for name, value in decisive.items():
        had = state["decisive"].get(name)
        if had != value:
            raise CheckpointError(f"checkpoint {file}: {name.replace('_', ' ')} is {had}, here it is {value}")
    return state


def _read_checkpoint(file: Path) -> State:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint {file}: {error.strerror or error}") from None
    except Exception as error:  # for a damaged file the reader may raise any exception
        raise CheckpointError(f"checkpoint {file} is damaged or not a checkpoint ({first_line(error)})") from None
    if not isinstance(state, dict) or set(state) != _PARTS:
        raise CheckpointError(f"checkpoint {file} is not a checkpoint of this program")
    return state


@dataclass(frozen=True)
class Start:
    """The initial state of a rank: the text, the options that determine the losses, and the checkpoint, if any."""

    text: bytes
    decisive: Mapping[str, object]
    state: State | None


def agree(recipe: Recipe, run: RunOptions) -> Start:
    """The start of all ranks. Raises `TaspLabError` on all of them if one cannot start or their options differ."""
    try:
        start = _check(recipe, run)
    except TaspLabError as error:
        check_agreement(error)
        raise
    check_agreement({**start.decisive, **_message_options(run), "checkpoint": start.state and start.state["step"]})
    return start


def check_agreement(own: Proposal | TaspLabError) -> None:
    """Raise `TaspLabError` on all ranks if one of them has an error or their proposals differ."""
    agreement.agree(own, None, TIMEOUT_S)


def _message_options(run: RunOptions) -> dict[str, object]:
    """The options that determine which messages a rank sends and expects."""
    names = ("steps", "schedule", "linear_schedule", "sequence_parallel", "checkpoint_activations", "save_every")
    return {name: vars(run)[name] for name in names} | {"save": run.save is not None}


def _check(recipe: Recipe, run: RunOptions) -> Start:
    groups, ranks = run.shape(recipe, dist.get_world_size())
    _check_schedules(recipe, run, recipe.batch // groups, ranks)
    text = _read(run.text)
    if recipe.seq >= len(text):
        raise WorkloadError(f"seq: {recipe.seq}, expected less than the {len(text)} bytes of {run.text}")
    if run.save is not None and dist.get_rank() == 0:
        _prepare_folder(run.save)
    decisive = vars(recipe) | {"text": hashlib.sha256(text).hexdigest()[:16]}
    state = None if run.resume is None else load(run.resume, decisive)
    if state is not None and state["step"] >= run.steps:
        raise RunError(f"steps: {run.steps}, expected more than the {state['step']} of the checkpoint")
    return Start(text, decisive, state)


def _check_schedules(recipe: Recipe, run: RunOptions, batch: int, ranks: int) -> None:
    """Raise `ScheduleError` for unknown schedules, and for one of linear attention that cannot do these layers."""
    if "L" in run.layouts(recipe, ranks):
        layer, decays = recipe.layer("L", batch), recipe.decays
        linear_schedules(run.linear_schedule, full_mesh(ranks), layer, None, AttentionOptions("both"), decays)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise WorkloadError(f"cannot read {file}: {error.strerror or error}") from None


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    check_writable(folder / FILE)
