"""Options that describe a question: the work (an attention layer, or the bytes of a collective), machine and rings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    DEFAULT_RINGS,
    DEFAULT_SAMPLES,
    LAYER,
    PASSES,
    WORK,
    ExpressionNumbers,
    FabricChoice,
    MachineChoice,
    RingChoice,
    SamplingChoice,
    machine_settings,
    of,
    options_class,
)
from tasp_lab.core.choices import Dtype, KindChoice
from tasp_lab.core.errors import ModelError, QuantityError
from tasp_lab.core.units import count_of, parse_count, parse_size_bytes
from tasp_lab.prediction.layout import Layout
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.layer import Work, Workload, expand_layers, window_of
from tasp_lab.workload.ranges import ranges_of

MAX_DOCUMENTS = 100_000
"""Each document adds blocks and kernel calls to a schedule, so simulations are limited to far fewer."""


if TYPE_CHECKING:
    from tasp_lab.machines.machine import Machine

    LayerFields = Workload
    LayoutFields = Layout
    OptionChoice = AttentionOptions
else:
    LAYER_TYPES = {"dtype": Dtype, "kind": KindChoice}
    LayerFields = options_class("LayerFields", Workload, LAYER, LAYER_TYPES, if_given=True)
    LayoutFields = options_class("LayoutFields", Layout, WORK, if_given=True)
    OptionChoice = options_class("OptionChoice", AttentionOptions, PASSES)
NO_FIELDS, NO_LAYOUT, DEFAULT_CHOICE = LayerFields(), LayoutFields(), OptionChoice()


@Parameter(name="*", group=LAYER)
@dataclass(frozen=True)
class LayerChoice:
    """An attention layer, and how it is computed.

    Args:
        model: A layer of this model, such as llama-3-8b or a model file: it sets heads, head dimension, mask, window,
            decay and layers.
    """

    fields: LayerFields = NO_FIELDS
    model: Annotated[str | None, of(LAYER)] = None
    choice: OptionChoice = DEFAULT_CHOICE

    def work(self, shard_bytes: str | None, *, is_plain: bool = True) -> Work:
        """The work: a layer of `seq` positions, or a collective; `is_plain` unless others of its options are given."""
        if self._is_layer == (shard_bytes is not None):
            got = "both" if self._is_layer else "neither"
            raise QuantityError(f"expected --seq (an attention layer) or --shard-bytes (a collective), got {got}")
        if shard_bytes is None:
            return self.workload()
        if self != DEFAULT_LAYER or not is_plain:
            raise QuantityError("options of attention layers apply with --seq only, not with --shard-bytes")
        return parse_size_bytes(shard_bytes)

    @property
    def given(self) -> dict[str, Any]:
        """The fields of the layer that are given as options."""
        return {name: value for name, value in vars(self.fields).items() if value is not None}

    @property
    def kind(self) -> str | None:
        """The kind of attention, or ``all``, if one is given."""
        return self.given.get("kind")

    @property
    def _is_layer(self) -> bool:
        return not self.given.keys().isdisjoint(("sequence", "documents", "ranges", "decode"))

    def workload(self) -> Workload:
        """The layer, or the hybrid. Raises `QuantityError` where its length is not given, and for the kind ``all``."""
        if self.kind == "all":
            raise QuantityError("kind: all, expected softmax, linear or hybrid; all of them are compared by compare")
        return self._workload(self.given)

    def workloads(self) -> list[Workload]:
        """With the kind ``all`` a layer of softmax and one of linear attention, and the hybrid if there are layers."""
        if self.kind != "all":
            return [self.workload()]
        if count_of(self.given.get("cached_keys", "0"), "cached keys", least=0):
            raise QuantityError("cached keys: expected none with --kind all, as linear attention has no cache of keys")
        if self.model is not None:
            raise QuantityError(f"kind: expected either all or the model {self.model!r}, not both")
        hybrid = self._workload({"layers": "LS"} | self.given | {"kind": "hybrid"})
        return [hybrid.of("S"), hybrid.of("L"), *([hybrid] if "layers" in self.given else [])]

    def _workload(self, given: dict[str, Any]) -> Workload:
        if not self._is_layer:
            raise QuantityError("expected an attention layer: --seq, --documents or --ranges")
        if "decode" in given and given.keys().isdisjoint(("sequence", "cached_keys")):
            raise QuantityError("decode without keys, expected --cached-keys, the keys of each sequence")
        given = {"kind": "hybrid"} | given if "layers" in given else given
        if "layers" in given and given["kind"] != "hybrid":
            raise QuantityError(f"layers: {given['layers'][:40]!r} with --kind {given['kind']}, expected --kind hybrid")
        given = layer_fields(self.model, given)
        if given.get("kind") == "hybrid" and "layers" not in given:
            raise QuantityError("kind: hybrid without --layers, expected a pattern such as LLSLLS or 4xLLLS")
        if "documents" in given:
            given["documents"] = parse_documents(given["documents"])
        sequence = sum(given.get("documents", ()))
        if "ranges" in given:
            given["ranges"] = ranges_of(given["ranges"])
            sequence = max(max(each.queries[1], each.keys[1]) for each in given["ranges"])
        return Workload(**{"sequence": sequence} | given)

    def options(self) -> AttentionOptions:
        """The options of the layer."""
        return AttentionOptions(**vars(self.choice))


_PLAIN = {"kind": "softmax", "window": None, "decay": "none", "layers": None, "linear_kv_heads": None,
          "sinks": False}  # fmt: skip
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

    found = load_model(model)
    values = found.layer_values()
    of_model = _PLAIN | {"value_dim": values["head_dim"]} | values
    given = {name: window_of(value) if name == "window" else value for name, value in given.items()}
    for name, value in given.items():
        if name == "layers" and of_model["layers"] and _repeats(value, of_model["layers"]):
            values["layers"] = value
        elif name not in of_model or (name == "window" and "W" in found.period and value == found.attention.window):
            values[name] = value
        elif of_model[name] != value:
            shown = "none" if of_model[name] is None else of_model[name]
            if name == "window" and "W" in found.period:
                shown = f"{found.attention.window} in some layers"
            raise ModelError(f"{name.replace('_', ' ')}: {value} with the model {model!r}, which has {shown}; expected "
                             "one of the two")  # fmt: skip
    return values


def _repeats(pattern: str, period: str) -> bool:
    """Whether a pattern is a period of layers, once or several times."""
    layers = expand_layers(pattern)
    return layers == period * (len(layers) // len(period))


def parse_documents(text: str) -> tuple[int, ...]:
    """The lengths of documents, listed or as COUNTxLENGTH, at most `MAX_DOCUMENTS`.

    >>> parse_documents("1000,2x1Ki,200")
    (1000, 1024, 1024, 200)
    """
    found = list[int]()
    for part in text.split(","):
        times, of, length = part.rpartition("x")
        count = parse_count(times, "number of documents") if of else 1
        if len(found) + count > MAX_DOCUMENTS:
            raise QuantityError(f"documents {text[:40]!r}: expected at most {MAX_DOCUMENTS} of them")
        found += [parse_count(length, "document")] * count
    return tuple(found)


DEFAULT_LAYER, AS_RUN, AS_IS = LayerChoice(), FabricChoice(), MachineChoice()


@Parameter(name="*")
@dataclass(frozen=True)
class QuestionChoice:
    """What `predict`, `compare` and `validate` have in common: the work, the machine with its settings, and rings."""

    layer: LayerChoice = DEFAULT_LAYER
    numbers: ExpressionNumbers = DEFAULT_NUMBERS
    machine: FabricChoice = AS_RUN
    rings: RingChoice = DEFAULT_RINGS

    def work(self, shard_bytes: str | None) -> Work:
        """The work: a layer, or a collective, to which the settings of layers do not apply."""
        machine = self.machine
        return self.layer.work(shard_bytes, is_plain=(machine.compute, machine.kernel, machine.stack) == (None,) * 3)

    def settings(self) -> dict[str, Any]:
        """The arguments of the functions of these names, by keyword."""
        return {**machine_settings(self.machine), **vars(self.rings), "options": self.layer.options()}


@Parameter(name="*")
@dataclass(frozen=True)
class PredictionChoice(QuestionChoice):
    """What `predict` and `compare` have in common."""

    machine: MachineChoice = AS_IS
    sampling: SamplingChoice = DEFAULT_SAMPLES

    def settings(self) -> dict[str, Any]:
        return super().settings() | self.sampling.given

    def load(self, topology: str) -> Machine:
        """The machine with its library."""
        return self.numbers.load(topology, self.machine.library)


DEFAULT_QUESTION, DEFAULT_PREDICTION = QuestionChoice(), PredictionChoice()


@Parameter(name="*", group=WORK)
@dataclass(frozen=True)
class LayoutChoice:
    """How ranks share a training step.

    Args:
        fsdp: Shard parameters, gradients and optimiser states: ZeRO stage 3.
    """

    fields: LayoutFields = NO_LAYOUT
    fsdp: Annotated[bool, of(WORK)] = True

    def layout(self) -> Layout:
        """The layout."""
        given = {name: value for name, value in vars(self.fields).items() if value is not None}
        return Layout(**given if self.fsdp else {"zero": 0} | given)


DEFAULT_LAYOUT = LayoutChoice()
