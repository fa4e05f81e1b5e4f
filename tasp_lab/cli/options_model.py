"""``--model``: a model of the catalogue gives the numbers of a layer; options may repeat them, not contradict them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasp_lab.core.errors import ModelError

_PLAIN = {"kind": "softmax", "window": None, "decay": "none", "layers": None, "linear_kv_heads": None}
"""What layers have that their model says nothing of."""


def layer_fields(model: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a layer: those given as options, and those of the model, if any.

    Raises `ModelError` for an unknown model, and for options that contradict it.

    >>> layer_fields("llama-3-8b", {"head_dim": 128})["kv_heads"], layer_fields(None, {"heads": 4})
    (8, {'heads': 4})
    """
    if model is None:
        return dict(given)
    from tasp_lab.workload.models.catalogue import load_model

    values = load_model(model).layer_values()
    found = _PLAIN | values
    for name, value in given.items():
        if name == "layers" and found["layers"] and _repeats(value, found["layers"]):
            values["layers"] = value
        elif found[name] != value:
            shown = "none" if found[name] is None else found[name]
            raise ModelError(f"{name.replace('_', ' ')}: {value} with the model {model!r}, which has {shown}; expected "
                             "one of the two")  # fmt: skip
    return values


def _repeats(pattern: str, period: str) -> bool:
    """Whether a pattern is a period of layers, once or several times."""
    from tasp_lab.workload.layer import expand_layers

    layers = expand_layers(pattern)
    return layers == period * (len(layers) // len(period))
