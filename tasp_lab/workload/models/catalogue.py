"""Models by name: the data files ``tasp_lab/workload/models/data/*.toml``, each with its sources, and files of users.

A file of a user is such a ``.toml``, or a ``config.json`` of Hugging Face's transformers, see
`tasp_lab.workload.models.hugging_face`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tasp_lab.core.errors import ModelError
from tasp_lab.core.records import as_text, converted, data_names, load_named
from tasp_lab.workload.models.hugging_face import model_of_config
from tasp_lab.workload.models.model import Model


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
    return load_named("model", "tasp_lab.workload.models", "data", text, _read, ModelError, (".toml", ".json"))


def _read(text: str, data: bytes) -> Model:
    path, is_own = Path(text), text in model_names()
    where = f"{'model' if is_own else 'file'} {text!r}"
    if not data.strip():
        raise ModelError(f"{where} is empty, expected a model")
    try:
        name = path.resolve().parent.name if path.name == "config.json" else text if is_own else path.stem
        if path.suffix.lower() == ".json":
            return model_of_config(msgspec.json.decode(as_text(data)), name)
        return msgspec.structs.replace(converted(msgspec.toml.decode(as_text(data)), Model), name=name)
    except (ValueError, ModelError) as error:
        raise ModelError(" ".join(f"{where}: {error}".split())) from error
