"""Models by name: the data files ``tasp_lab/workload/models/data/*.toml``, each with its sources, and files of users.

A file of a user is such a ``.toml``, or a ``config.json`` of Hugging Face's transformers, see
`tasp_lab.workload.models.hugging_face`.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from tasp_lab.core.errors import ModelError, expected_one_of, of_type
from tasp_lab.core.records import converted, data_names
from tasp_lab.workload.models.hugging_face import model_of_config
from tasp_lab.workload.models.model import Model

_SUFFIX, _CONFIG = ".toml", ".json"


def model_names() -> list[str]:
    """The models of tasp-lab, in alphabetical order.

    >>> "llama-3-8b" in model_names()
    True
    """
    return data_names("tasp_lab.workload.models", "data")


def load_model(text: str) -> Model:
    """The model of a name, of a ``.toml`` file in the form of those of tasp-lab, or of a ``config.json``.

    >>> load_model("llama-3-70b").attention.heads
    64

    Raises `ModelError` for an unknown name, and for a file that cannot be read or does not describe a model.
    """
    if not isinstance(text, str):
        raise ModelError(of_type("model", text, "the name of a model"))
    if text in model_names():
        return _built_in(text)
    if not (text.lower().endswith((_SUFFIX, _CONFIG)) or os.path.exists(text)):
        name = text.rpartition("/")[2]  # Hugging Face has the maker before it
        raise ModelError(f"unknown model {text!r}, {expected_one_of(name, model_names())}, or a .toml or .json file")
    path = Path(text)
    try:
        is_config = path.suffix.lower() == _CONFIG
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _read(f"file {text!r}", name, path.read_bytes(), is_config=is_config)
    except (OSError, ValueError) as error:
        raise ModelError(f"file {text!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@cache
def _built_in(name: str) -> Model:
    data = (files("tasp_lab.workload.models") / "data" / f"{name}{_SUFFIX}").read_bytes()
    return _read(f"model {name!r}", name, data)


def _read(where: str, name: str, data: bytes, *, is_config: bool = False) -> Model:
    if not data.strip():
        raise ModelError(f"{where} is empty, expected a model")
    try:
        if is_config:
            return model_of_config(msgspec.json.decode(data), name)
        return msgspec.structs.replace(converted(msgspec.toml.decode(data), Model), name=name)
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: expected UTF-8 text, byte {error.start} is something else") from error
    except (ValueError, ModelError) as error:
        raise ModelError(" ".join(f"{where}: {error}".split())) from error
