"""What all ranks find out, and tell each other, before anything takes time: they start together or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.train_gpt.checkpoint import FILE, State, load
from experiments.train_gpt.options import Recipe, Way
from runtime.agreement import Proposal, demand_equal, exchange
from runtime.transport import device
from tasp_lab.attention import attention_placement
from tasp_lab.errors import OutputError, RunError, TaspLabError, WorkloadError
from tasp_lab.output import check_writable

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Start:
    """What a rank starts with: the text, all that decides the losses, and the checkpoint to go on from, if any."""

    text: bytes
    decisive: Mapping[str, object]
    state: State | None


def agree(recipe: Recipe, way: Way) -> Start:
    """How all ranks start. Raises `TaspLabError` on all of them where one cannot start, or where they differ."""
    try:
        start = _check(recipe, way)
    except TaspLabError as error:
        together(error)
        raise
    together({**start.decisive, **_posted(way), "checkpoint": start.state and start.state["step"]})
    return start


def together(own: Proposal | TaspLabError) -> None:
    """Go on if all ranks say the same, else raise `TaspLabError` on all of them."""
    everyone = exchange(own, torch.device(device()), None, TIMEOUT_S)
    demand_equal(everyone, list(everyone[0]))


def _posted(way: Way) -> dict[str, object]:
    """What decides which messages a rank sends and expects."""
    names = ("steps", "schedule", "sequence_parallel", "checkpoint_activations", "save_every")
    return {name: vars(way)[name] for name in names} | {"save": way.save is not None}


def _check(recipe: Recipe, way: Way) -> Start:
    groups, ranks = way.shape(recipe, dist.get_world_size())
    attention_placement(way.schedule, recipe.attention(recipe.batch // groups), ranks)
    text = _read(way.text)
    if recipe.seq >= len(text):
        raise WorkloadError(f"seq: {recipe.seq}, expected less than the {len(text)} bytes of {way.text}")
    if way.save is not None and dist.get_rank() == 0:
        _prepare_folder(way.save)
    decisive = vars(recipe) | {"text": hashlib.sha256(text).hexdigest()[:16]}
    state = None if way.resume is None else load(way.resume, decisive)
    if state is not None and state["step"] >= way.steps:
        raise RunError(f"steps: {way.steps}, expected more than the {state['step']} of the checkpoint")
    return Start(text, decisive, state)


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
