"""Options that describe a question: the work (an attention layer, or the bytes of a collective), machine and rings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Parameter

from tasp_lab.cli.options import (
    DEFAULT_NUMBERS,
    DEFAULT_RINGS,
    DEFAULT_SAMPLES,
    LAYER,
    NO_CHANGES,
    PASSES,
    WORK,
    Contention,
    ExpressionNumbers,
    Library,
    LinkEdits,
    Overrides,
    RingChoice,
    SamplingChoice,
    StackName,
    option,
    quantity,
    whole,
)
from tasp_lab.core.choices import Checkpointing, Decay, Dtype, KindChoice
from tasp_lab.core.errors import ModelError, QuantityError
from tasp_lab.core.units import parse_count, parse_size_bytes
from tasp_lab.schedules.attention.options import OPTIONS, AttentionOptions
from tasp_lab.workload.mask import MASKS

if TYPE_CHECKING:
    from tasp_lab.core.choices import AttentionKind
    from tasp_lab.prediction.training_step.layout import Layout
    from tasp_lab.workload.layer import Work, Workload

MAX_DOCUMENTS = 100_000
"""Each document adds blocks and kernel calls to a schedule, so simulations are limited to far fewer."""


def _choice(help: str, name: str | None = None) -> Parameter:
    return Parameter(name=name, help=help, group=LAYER)


def _option_choice() -> type:
    """The options of `AttentionOptions` as those of the command line."""
    hints, found = get_type_hints(AttentionOptions), list[tuple[str, Any, Any]]()
    for each in fields(AttentionOptions):
        about = OPTIONS[each.name]
        shown = Parameter(help=about.help, group=PASSES) if about.least is None else whole(about.help, PASSES)
        if each.name == "passes":
            shown = _choice(about.help, name="--pass")
        found.append((each.name, Annotated[hints[each.name], shown], each.default))
    # cyclopts takes a class of the module `types` for one value
    return make_dataclass("OptionChoice", found, frozen=True, namespace={"__module__": __name__})


if TYPE_CHECKING:
    OptionChoice = AttentionOptions
else:
    OptionChoice = Parameter(name="*")(_option_choice())
DEFAULT_CHOICE = OptionChoice()


@Parameter(name="*", group=LAYER)
@dataclass(frozen=True)
class LayerChoice:
    """An attention layer, and how it is computed."""

    seq: Annotated[
        str | None, quantity("Positions of an attention layer over all ranks: 8192 or 128Ki (131072).", LAYER)
    ] = None
    documents: Annotated[
        str | None,
        quantity(
            "Lengths of packed documents, which attend only to themselves: 1000,200,4096 or 8x512. Replaces --seq, "
            "their sum.",
            LAYER,
        ),
    ] = None
    batch: Annotated[int, whole("Sequences.", LAYER)] = 1
    model: Annotated[
        str | None,
        _choice(
            "A layer of this model, such as llama-3-8b or a model file: it sets heads, head dimension, mask, window, "
            "decay and layers."
        ),
    ] = None
    heads: Annotated[int | None, whole("Query heads. Default: 32.", LAYER)] = None
    kv_heads: Annotated[int | None, whole("Key and value heads. Default: --heads.", LAYER)] = None
    head_dim: Annotated[int | None, whole("Elements per head. Default: 128.", LAYER)] = None
    dtype: Annotated[Dtype, _choice("Dtype of queries, keys, values and results.")] = "bf16"
    mask: Annotated[
        str | None,
        _choice(f"{', '.join(MASKS)}; causal: queries attend to keys up to their position. Default: causal."),
    ] = None
    window: Annotated[int | None, whole("Of a causal mask: the most keys that a query attends to.", LAYER)] = None
    cached_keys: Annotated[
        str,
        quantity(
            "How many of the first --seq positions have keys and values only, as in a KV cache. Forward only, without "
            "--documents.",
            LAYER,
        ),
    ] = "0"
    kind: Annotated[
        KindChoice | None,
        _choice(
            "Attention of the layer; hybrid: a stack of both kinds; all: a table of each (compare only). Default: "
            "softmax, with --layers hybrid."
        ),
    ] = None
    layers: Annotated[
        str | None, _choice("Layers of a hybrid, L for linear and S for softmax attention, such as LLSLLS or 4xLLLS.")
    ] = None
    linear_kv_heads: Annotated[
        int | None, whole("KV heads of the linear layers of a hybrid. Default: --kv-heads.", LAYER)
    ] = None
    decay: Annotated[
        Decay | None,
        _choice(
            "Decay of linear attention under a causal mask: constant per KV head (head), or from the data, per "
            "position and KV head (scalar) or also per channel. Default: none."
        ),
    ] = None
    choice: OptionChoice = DEFAULT_CHOICE
    compute: Annotated[
        str | None,
        Parameter(
            group=LAYER,
            help="timed:300TFLOP/s: kernel calls take as long as at this rate; real: run the kernels (validate only). "
            "Default: the rates of the machine, or one marked as assumed; in validate on other fabrics than emulated: "
            "real.",
            show_default=False,
        ),
    ] = None
    kernel: Annotated[
        str | None,
        Parameter(
            group=LAYER,
            help="Kernel model, such as flash-attention-3; tasp-lab profile show lists those of a machine. Default: "
            "that of the stack, or else of PyTorch.",
            show_default=False,
        ),
    ] = None
    stack: StackName = None

    def work(self, shard_bytes: str | None) -> Work:
        """The work: a layer of `seq` positions, or a collective."""
        if self._is_layer == (shard_bytes is not None):
            got = "both" if self._is_layer else "neither"
            raise QuantityError(f"expected --seq (an attention layer) or --shard-bytes (a collective), got {got}")
        if shard_bytes is None:
            return self.workload()
        if self != DEFAULT_LAYER:
            raise QuantityError("options of attention layers apply with --seq only, not with --shard-bytes")
        return parse_size_bytes(shard_bytes)

    @property
    def _is_layer(self) -> bool:
        return self.seq is not None or self.documents is not None

    def workload(self) -> Workload:
        """The layer, or the hybrid. Raises `QuantityError` where its length is not given, and for the kind ``all``."""
        if self.kind == "all":
            raise QuantityError("kind: all, expected softmax, linear or hybrid; all of them are compared by compare")
        return self._workload(self.kind, self.layers)

    def workloads(self) -> list[Workload]:
        """With the kind ``all`` a layer of softmax and one of linear attention, and the hybrid if there are layers."""
        if self.kind != "all":
            return [self.workload()]
        if parse_count(self.cached_keys, "cached keys", least=0):
            raise QuantityError("cached keys: expected none with --kind all, as linear attention has no cache of keys")
        if self.model is not None:
            raise QuantityError(f"kind: expected either all or the model {self.model!r}, not both")
        hybrid = self._workload("hybrid", "LS" if self.layers is None else self.layers)
        return [hybrid.of("S"), hybrid.of("L"), *([] if self.layers is None else [hybrid])]

    def _workload(self, kind: AttentionKind | None, layers: str | None) -> Workload:
        from tasp_lab.workload.layer import Workload as Layer

        if not self._is_layer:
            raise QuantityError("expected an attention layer: --seq, or --documents")
        if kind in ("softmax", "linear") and layers is not None:
            raise QuantityError(f"layers: {layers[:40]!r} with --kind {kind}, expected --kind hybrid")
        fields = self._fields(kind, layers)
        if kind == "hybrid" and "layers" not in fields:
            raise QuantityError("kind: hybrid without --layers, expected a pattern such as LLSLLS or 4xLLLS")
        documents = None if self.documents is None else parse_documents(self.documents)
        return Layer(
            sequence=sum(documents or ()) if self.seq is None else parse_count(self.seq, "sequence"),
            batch=self.batch,
            dtype=self.dtype,
            documents=documents,
            cached_keys=parse_count(self.cached_keys, "cached keys", least=0),
            **fields,
        )

    def _fields(self, kind: AttentionKind | None, layers: str | None) -> dict[str, Any]:
        """The fields of the layer that the model and options give."""
        names = ("heads", "kv_heads", "head_dim", "mask", "window", "decay", "linear_kv_heads")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if layers is not None:
            given |= {"kind": "hybrid", "layers": layers}
        return layer_fields(self.model, given if kind is None else given | {"kind": kind})

    def options(self) -> AttentionOptions:
        """The options of the layer."""
        return AttentionOptions(**vars(self.choice))


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


DEFAULT_LAYER = LayerChoice()


@Parameter(name="*")
@dataclass(frozen=True)
class QuestionChoice:
    """What `predict`, `compare` and `validate` have in common: the work, the machine and its changes, and rings."""

    layer: LayerChoice = DEFAULT_LAYER
    numbers: ExpressionNumbers = DEFAULT_NUMBERS
    changes: LinkEdits = NO_CHANGES
    overrides: Overrides = ()
    rings: RingChoice = DEFAULT_RINGS

    def settings(self) -> dict[str, Any]:
        """The arguments of the functions of these names, by keyword."""
        return {
            "without_links": self.changes.without_link,
            "links": self.changes.link,
            "overrides": self.overrides,
            **vars(self.rings),
            "options": self.layer.options(),
            "compute": self.layer.compute,
            "kernel": self.layer.kernel,
        }


@Parameter(name="*")
@dataclass(frozen=True)
class PredictionChoice(QuestionChoice):
    """What `predict` and `compare` have in common."""

    library: Library = "auto"
    contention: Contention = None
    sampling: SamplingChoice = DEFAULT_SAMPLES

    def settings(self) -> dict[str, Any]:
        contention = None if self.contention is None else self.contention == "on"
        return super().settings() | {"contention": contention, "stack": self.layer.stack} | self.sampling.given


DEFAULT_QUESTION, DEFAULT_PREDICTION = QuestionChoice(), PredictionChoice()


@Parameter(name="*", group=WORK)
@dataclass(frozen=True)
class LayoutChoice:
    """How ranks share a training step."""

    tp: Annotated[int, whole("Tensor parallelism: ranks that share heads and MLP.", WORK)] = 1
    cp: Annotated[
        int | None, whole("Context parallelism: ranks that share a sequence. Default: all that are left.", WORK)
    ] = None
    pp: Annotated[int, whole("Pipeline stages.", WORK)] = 1
    dp: Annotated[int | None, whole("Replicas with sequences of their own. Default: all that are left.", WORK)] = None
    fsdp: Annotated[
        bool, Parameter(group=WORK, help="Shard parameters, gradients and optimiser states: ZeRO stage 3.")
    ] = True
    zero: Annotated[
        int | None,
        whole("ZeRO stage: 0 shards nothing, 1 optimiser states, 2 also gradients, 3 all. --no-fsdp: 0.", WORK),
    ] = None
    interleave: Annotated[int, whole("Parts of the model per pipeline stage.", WORK)] = 1
    microbatches: Annotated[int, whole("Micro-batches per step.", WORK)] = 1
    checkpointing: Annotated[
        Checkpointing,
        Parameter(
            group=WORK,
            help="What the backward pass recomputes: nothing, a layer without its attention (selective), or all; "
            "offload: all, from layer inputs in the memory of the host.",
        ),
    ] = "full"
    logit_chunks: Annotated[int, whole("Parts in which logits are computed.", WORK)] = 1
    offload: Annotated[
        bool, option("Keep optimiser states in the memory of the host; of some stacks all that FSDP shards.", WORK)
    ] = False
    ep: Annotated[
        int,
        whole("Expert parallelism: ranks of cp x dp that share experts. Default: each rank has a part of all.", WORK),
    ] = 1
    overlap: Annotated[
        bool | None,
        Parameter(
            group=WORK,
            help="Move parameters and gradients beside layers, as with Megatron's --overlap-grad-reduce and "
            "--overlap-param-gather. Default: as the stack does without flags; without a stack yes.",
        ),
    ] = None
    order: Annotated[
        str, Parameter(group=WORK, help="Which ranks form groups: from neighbours to those that are farthest apart.")
    ] = "tp-cp-dp-pp"

    def layout(self) -> Layout:
        """The layout."""
        from tasp_lab.prediction.training_step.layout import Layout

        given = {name: value for name, value in vars(self).items() if name != "fsdp"}
        return Layout(**given | {"zero": (3 if self.fsdp else 0) if self.zero is None else self.zero})


DEFAULT_LAYOUT = LayoutChoice()
