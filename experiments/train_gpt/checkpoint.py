"""Checkpoints: one file with the complete training state, independent of the number of ranks and the schedule."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.core.files import write_whole

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
    except Exception as error:  # for a damaged file the reader may raise any exception
        raise CheckpointError(f"checkpoint {file} is damaged or not a checkpoint ({first_line(error)})") from None
    if not isinstance(state, dict) or set(state) != _PARTS:
        raise CheckpointError(f"checkpoint {file} is not a checkpoint of this program")
    return state
