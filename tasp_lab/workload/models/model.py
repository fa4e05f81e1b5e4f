"""A model in numbers: layers, attention, MLP and experts, vocabulary. It makes the attention layer of a schedule."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import msgspec

from tasp_lab.core.choices import Decay
from tasp_lab.core.errors import ModelError, WorkloadError, unknown
from tasp_lab.core.records import Count, Record, Text
from tasp_lab.workload.layer import MAX_LAYERS, Workload, expand_layers


class Latent(Record, frozen=True, forbid_unknown_fields=True):
    """Low ranks of multi-head latent attention (arXiv:2405.04434, section 2.1).

    Parameters
    ----------
    query_rank, kv_rank : elements of the latent vectors of queries, and of keys and values together.
    rope_dim : elements of a head of queries and keys that have rotary positions; those of keys are shared by all heads.
    """

    query_rank: Count
    kv_rank: Count
    rope_dim: Count


class Attention(Record, frozen=True, forbid_unknown_fields=True):
    """The softmax attention of a layer.

    Parameters
    ----------
    heads, kv_heads : query heads, and heads of keys and values; as many if None.
    head_dim, value_dim : elements per head of queries and keys, and of values; as many if None.
    window : maximum number of keys per query, of layers W, or of all layers of a model without W; all keys if None.
    biases : whether projections of queries, keys and values have biases.
    head_norms : whether each head of queries and keys is normalised.
    latent : the low ranks of latent attention, if it is that.
    sinks : whether each head has a learned sink, see `Workload`.
    repeats_kv : whether keys and values are repeated for all query heads before attention, as by software whose kernel
        has no groups of heads. They travel like that; projections stay the same.
    """

    heads: Count
    head_dim: Count
    kv_heads: Count | None = None
    value_dim: Count | None = None
    window: Count | None = None
    biases: bool = False
    head_norms: bool = False
    latent: Latent | None = None
    sinks: bool = False
    repeats_kv: bool = False

    @property
    def kv_head_count(self) -> int:
        return self.kv_heads or self.heads

    @property
    def passed_kv_heads(self) -> int:
        """The number of KV heads that attention is given: of all query heads if they are repeated."""
        return self.heads if self.repeats_kv else self.kv_head_count

    @property
    def value_size(self) -> int:
        """Elements per head of values."""
        return self.value_dim or self.head_dim


class Linear(Record, frozen=True, forbid_unknown_fields=True):
    """What linear layers have besides: their decay, KV heads (as many as heads if None), a gate on their results."""

    decay: Decay = "none"
    kv_heads: Count | None = None
    gate: bool = False


class MLP(Record, frozen=True, forbid_unknown_fields=True):
    """The MLP of a layer: its width, and whether it is gated, which takes three matrices instead of two."""

    width: Count
    gated: bool = True


class Experts(Record, frozen=True, forbid_unknown_fields=True):
    """Experts: gated MLPs, of which each token takes some.

    Parameters
    ----------
    count, active, shared : how many there are, how many a token takes of them, and how many every token takes besides.
    width : of each expert.
    dense_layers : how many first layers have an MLP instead.
    every : layers of which only the last has experts, the others an MLP: 2 for every other layer.
    router_biases : whether the router has a bias per expert.
    """

    count: Count
    active: Count
    width: Count
    shared: Annotated[int, msgspec.Meta(ge=0)] = 0
    dense_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    every: Count = 1
    router_biases: bool = False


class Published(Record, frozen=True, forbid_unknown_fields=True):
    """The number of parameters that its makers state, such as ``8.03B``: all, and those that a token passes."""

    parameters: Text
    source: Text
    active: Text | None = None


class Model(Record, frozen=True, forbid_unknown_fields=True):
    """A model.

    Parameters
    ----------
    name : its name, that of its file.
    summary, source : what it is, and where the numbers come from.
    layers : how many layers of softmax attention, or the pattern of a model that mixes layers: ``10xLLLLLLLS``, where L
        has linear attention, or ``8xWWWWWS``, where W has the window of `attention` and S has none.
    hidden_size : elements of a hidden state.
    vocabulary : of the embedding and of the output; 0 for a model without both.
    attention, linear : of layers of softmax and of linear attention. All have the same heads and head dimension.
    mlp, experts : what follows attention in a layer.
    mask : of attention.
    tied_embeddings : whether embedding and output are one matrix.
    published : the stated number of parameters.

    Raises `ModelError` for numbers that contradict each other.
    """

    summary: Text
    source: Text
    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)] | Text
    hidden_size: Count
    attention: Attention
    vocabulary: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    mlp: MLP | None = None
    experts: Experts | None = None
    linear: Linear | None = None
    mask: Text = "causal"
    tied_embeddings: bool = False
    published: Published | None = None
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.layer(2**10)
        except WorkloadError as error:
            raise ModelError(str(error)) from None
        _check(self)

    @property
    def pattern(self) -> str:
        """The letters of all layers: S for softmax and L for linear attention, as in `Workload`, W with a window."""
        return "S" * self.layers if isinstance(self.layers, int) else expand_layers(self.layers, "LSW")

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts.

        >>> from tasp_lab.workload.models.catalogue import load_model
        >>> load_model("deepseek-v3").expert_layers[:5]
        (False, False, False, True, True)
        """
        experts = self.experts
        return tuple(
            experts is not None and number > experts.dense_layers and number % experts.every == 0
            for number in range(1, len(self.pattern) + 1)
        )

    @property
    def period(self) -> str:
        """The letters that the pattern repeats.

        >>> from tasp_lab.workload.models.catalogue import load_model
        >>> load_model("minimax-text-01").period, load_model("llama-3-8b").period
        ('LLLLLLLS', 'S')
        """
        # A text is a repetition of its first letters exactly if it is found again in itself twice, there.
        return self.pattern[: (self.pattern * 2).index(self.pattern, 1)]

    def layer(self, sequence: int | str, batch: int = 1, **changes: Any) -> Workload:
        """The attention layer of the model, or one period of a hybrid, over so many positions.

        Of a model with a window in some layers it is a layer without: `window=model.attention.window` gives the others.
        `changes` are other fields of `Workload`, as studies change them.

        >>> from tasp_lab.workload.models.catalogue import load_model
        >>> layer = load_model("llama-3-8b").layer(8192, kv_heads=4)
        >>> layer.heads, layer.kv_heads, layer.mask
        (32, 4, 'causal')
        >>> load_model("minimax-text-01").layer(8192).layers, load_model("deepseek-v3").layer(8192).widths
        ('LLLLLLLS', '192/128')

        Raises `WorkloadError` for values that a layer cannot have, and for unknown fields.
        """
        known = [each.name for each in fields(Workload)]
        for name in (each for each in changes if each not in known):
            raise WorkloadError(unknown("field of a layer", name, known))
        return Workload(**{"sequence": sequence, "batch": batch} | self.layer_values() | changes)

    def layer_values(self) -> dict[str, Any]:
        """The fields of a layer that follow from the model, by name; those of a plain layer are left out."""
        attention, period, linear = self.attention, self.period, self.linear or Linear()
        values: dict[str, Any] = {
            "heads": attention.heads,
            "kv_heads": attention.passed_kv_heads,
            "head_dim": attention.head_dim,
            "mask": self.mask,
        }
        if attention.value_size != attention.head_dim:
            values["value_dim"] = attention.value_size
        if attention.window is not None and "W" not in period:
            values["window"] = attention.window
        if attention.sinks:
            values["sinks"] = True
        if "L" not in period:
            return values
        values["decay"], linear_kv_heads = linear.decay, linear.kv_heads or attention.heads
        if "S" not in period:
            return values | {"kind": "linear", "kv_heads": linear_kv_heads}
        return values | {"kind": "hybrid", "layers": period, "linear_kv_heads": linear_kv_heads}


def _check(model: Model) -> None:
    """Raise `ModelError` for parts that contradict each other or are missing."""
    pattern, attention, experts, latent = model.pattern, model.attention, model.experts, model.attention.latent
    if not all(model.expert_layers) and model.mlp is None:
        raise ModelError("no [mlp], expected one for layers without experts")
    if model.linear is not None and "L" not in pattern:
        raise ModelError("[linear] in a model without linear layers, expected a pattern with L")
    if "W" in pattern and attention.window is None:
        raise ModelError("layers W without a window, expected window in [attention]")
    if "W" in pattern and ("S" not in pattern or "L" in pattern):
        raise ModelError("layers W, expected S for the others: a window in all softmax layers is written without W")
    if experts is not None and experts.every > len(pattern):
        raise ModelError(f"experts in every {experts.every} of {len(pattern)} layers, expected in some")
    if experts is not None and experts.active > experts.count:
        raise ModelError(f"{experts.active} active experts of {experts.count}")
    if experts is not None and experts.dense_layers > len(pattern):
        raise ModelError(f"{experts.dense_layers} dense layers of {len(pattern)}")
    if latent is not None and latent.rope_dim >= attention.head_dim:
        raise ModelError(f"rope_dim: {latent.rope_dim}, expected fewer than head_dim, {attention.head_dim}")
