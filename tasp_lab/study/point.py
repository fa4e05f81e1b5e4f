"""A point of a study: one layer by one schedule on one machine. Its key follows from its inputs alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields

from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.machines.sampling import Sampling
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
    schedule : a name of `tasp_lab.analysis.registry`.
    layer : the layer.
    options : of the schedule; its passes among them.
    library, kernel, runtime, contention : see `tasp_lab.analysis.predict.predict`.
    overrides : texts such as ``nic.bandwidth=x2``, applied in order, see `tasp_lab.overrides`.
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
        """All that determines the answer, besides the constants of the machine and the version, ready for JSON."""
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

    def key(self, constants: str, version: str) -> str:
        """A hash of the inputs, the hash of the machine's constants and the version of tasp-lab, 32 hexadecimal digits.

        >>> point = Point("h100-8", "tasp", Workload(8192))
        >>> point.key("", "1") == Point("h100-8", "tasp", Workload(8192), labels=(("seq", 8192),)).key("", "1")
        True
        >>> point.key("", "1") == point.key("", "2")
        False
        """
        text = json.dumps([self.inputs(), constants, version], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
