"""Checkpoints: one file that holds all that decides the rest of a run, whatever its ranks and schedule."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasp_lab.errors import TaspLabError, first_line
from tasp_lab.output import write_whole

FILE = "checkpoint.pt"
_PARTS = {"decisive", "step", "model", "optimizer", "random"}

State = dict[str, Any]
"""`decisive`: what decides the losses; `step`: steps done; `model`, `optimizer`: as torch makes them;
`random`: state of the generator that draws sequences."""


class CheckpointError(TaspLabError):
    """A checkpoint that cannot be read, or that belongs to another run. The message names the file."""


def save(folder: Path, state: State) -> None:
    """Replace the checkpoint of a folder as a whole. Raises `OutputError`."""
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(folder / FILE, content.getvalue())


def load(folder: Path, decisive: Mapping[str, object]) -> State:
    """The checkpoint of a folder, if it was made with these options. Raises `CheckpointError`."""
    file = folder / FILE
    state = _read(file)
    for name, value in decisive.items():
        had = state["decisive"].get(name)
        if had != value:
            raise CheckpointError(f"checkpoint {file}: {name.replace('_', ' ')} is {had}, here it is {value}")
    return state


def _read(file: Path) -> State:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint {file}: {error.strerror or error}") from None
    except Exception as error:  # a file that is cut or is something else makes the reader raise nearly anything
        raise CheckpointError(f"checkpoint {file} is damaged or no checkpoint ({first_line(error)})") from None
    if not isinstance(state, dict) or set(state) != _PARTS:
        raise CheckpointError(f"checkpoint {file} is no checkpoint of this program")
    return state
