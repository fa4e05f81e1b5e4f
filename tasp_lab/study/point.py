"""A point of a study: one layer by one schedule on one machine, and the keys that its answer is kept by.

An answer follows from the inputs of the point, the machine with all of its constants, the schedules that were built,
and the version of the engines and models. `Point.question` is the hash of all of these but the schedules, which costs
no building; `key_of` adds the schedules. A file or a function that changes under the same name gives another key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields

from tasp_lab.core.version import MODEL_VERSION
from tasp_lab.machines.sampling import Sampling
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.workload.layer import Workload, is_left_out

AS_IS = "as is"
"""The variant in which nothing is changed."""

NO_SAMPLES = Sampling(0)

Value = str | int | float | bool | None
"""A value of an axis, or of a cell of a row."""


@dataclass(frozen=True)
class Point:
    """One question.

    Parameters
    ----------
    machine : a name, an expression or a file, as `tasp_lab.machines.catalogue.load_machine` takes it.
    schedule : a name of `tasp_lab.schedules.registry`.
    layer : the layer.
    options : of the schedule; its passes among them.
    library, kernel, runtime, contention : see `tasp_lab.prediction.predict.predict`.
    overrides : texts such as ``nic.bandwidth=x2``, applied in order, see `tasp_lab.machines.overrides`.
    sampling : of the constants, for the interval; no samples for an interval of residuals alone.
    labels : the values of the study's axes, by name, for tables. They are no inputs: equal questions have equal keys.
    """

    machine: str
    schedule: str
    layer: Workload
    options: AttentionOptions = DEFAULT_OPTIONS
    library: str = "auto"
    kernel: str | None = None
    runtime: str | None = None
    contention: bool | None = None
    overrides: tuple[str, ...] = ()
    sampling: Sampling = NO_SAMPLES
    labels: tuple[tuple[str, Value], ...] = field(default=(), compare=False)

    def label(self, name: str, default: Value = None) -> Value:
        """The value of an axis, or `default`."""
        return dict(self.labels).get(name, default)

    def inputs(self) -> dict[str, object]:
        """What is asked, by name, ready for JSON."""
        layer = {
            each.name: getattr(self.layer, each.name)
            for each in fields(self.layer)
            if not is_left_out(self.layer, each)
        }
        options = {each.name: getattr(self.options, each.name) for each in fields(self.options)}
        rest = ("machine", "schedule", "library", "kernel", "runtime", "contention")
        return {
            **{name: getattr(self, name) for name in rest},
            "layer": layer,
            "options": options,
            "overrides": list(self.overrides),
            "samples": self.sampling.samples,
            "seed": self.sampling.seed,
        }

    def question(self, constants: str, models: int = MODEL_VERSION) -> str:
        """The hash of the inputs, of the machine (`constants` is its hash) and of the version of engines and models.

        >>> point = Point("h100-8", "tasp", Workload(8192))
        >>> point.question("") == Point("h100-8", "tasp", Workload(8192), labels=(("seq", 8192),)).question("")
        True
        >>> point.question("", models=1) == point.question("", models=2)
        False
        """
        return _sha256([self.inputs(), constants, models])


def key_of(question: str, schedules: str) -> str:
    """The key of an answer: of a question and the hash of the schedules that were built for it."""
    return _sha256([question, schedules])


def _sha256(document: object) -> str:
    """32 hexadecimal digits."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
