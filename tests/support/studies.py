"""Small studies, quick to run."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "study": {"name": "small"},
    "machine": {"name": "full-mesh:{n}", "n": [2, 4]},
    "layer": {"seq": "geom(1Ki, 8Ki, 2)", "heads": 4, "mask": "causal"},
    "schedule": {"name": ["ring-attention", "ulysses", "usp:2x2"], "baseline": "ring-attention"},
}
"""24 points, of which those of usp:2x2 on two ranks are refused."""


PLANS: dict[str, Any] = {
    "study": {"name": "plans"},
    "machine": {"name": "full-mesh:2"},
    "layer": {"seq": "1Ki", "model": "llama-3-8b"},
    "plan": {"batch_tokens": ["1Ki", "2Ki"], "simulations": 1},
}
"""Two plans."""


def study_of(**sections: dict[str, Any]) -> dict[str, Any]:
    """`SMALL` with more in some of its sections."""
    return _with(SMALL, sections)


def plans_of(**sections: dict[str, Any]) -> dict[str, Any]:
    """`PLANS` with more in some of its sections."""
    return _with(PLANS, sections)


def _with(study: dict[str, Any], sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys([*study, *(name.replace("_", "-") for name in sections)])
    return {name: study.get(name, {}) | sections.get(name.replace("-", "_"), {}) for name in names}
