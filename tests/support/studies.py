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


def study_of(**sections: dict[str, Any]) -> dict[str, Any]:
    """`SMALL` with more in some of its sections."""
    names = dict.fromkeys([*SMALL, *(name.replace("_", "-") for name in sections)])
    return {name: SMALL.get(name, {}) | sections.get(name.replace("-", "_"), {}) for name in names}
