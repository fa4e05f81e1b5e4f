"""How many parameters a model has, and how many of them multiply each token.

A matrix costs a token two FLOPs per parameter, forward; biases and norms are counted, but cost next to nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tasp_lab.workload.models.model import MLP, Attention, Experts, Linear, Model


class Parameters(NamedTuple):
    """Parameters of a layer, or of a part of it.

    Parameters
    ----------
    stored : all of them.
    matrices : those of matrices that a token is multiplied with; of experts, those that it takes.
    """

    stored: int
    matrices: int

    def __add__(self, other: object) -> Parameters:
        assert isinstance(other, Parameters), "parameters are added to parameters"
        return Parameters(self.stored + other.stored, self.matrices + other.matrices)


def parameter_count(model: Model) -> int:
    """The number of parameters of a model: layers, the last norm, embedding and output.

    >>> from tasp_lab.workload.models.catalogue import load_model
    >>> parameter_count(load_model("llama-3-8b"))
    8030261248
    """
    layers = sum(each.stored for each in layer_parameters(model))
    return layers + model.hidden_size + embedding_parameters(model).stored


def active_parameters(model: Model) -> int:
    """The parameters of all matrices that multiply a token, those of the output among them."""
    return sum(each.matrices for each in layer_parameters(model)) + embedding_parameters(model).matrices


def layer_parameters(model: Model) -> list[Parameters]:
    """The parameters of each layer, with its norms."""
    dense = len(model.pattern) if model.experts is None else model.experts.dense_layers
    return [layer_of(model, letter, has_experts=number >= dense) for number, letter in enumerate(model.pattern)]


@lru_cache(maxsize=256)
def layer_of(model: Model, letter: str, *, has_experts: bool) -> Parameters:
    """The parameters of a layer: attention, L or S, and an MLP or experts, and a norm before each."""
    hidden = model.hidden_size
    following = _following(hidden, model.mlp, model.experts if has_experts else None)
    return attention_parameters(model, letter) + following + Parameters(2 * hidden, 0)


def attention_parameters(model: Model, letter: str) -> Parameters:
    """The parameters of the projections of a layer, L or S, with their biases and norms."""
    if letter == "L":
        return _of_linear(model.hidden_size, model.attention, model.linear or Linear())
    return _of_latent(model.hidden_size, model.attention) or _of_softmax(model.hidden_size, model.attention)


def embedding_parameters(model: Model) -> Parameters:
    """The parameters of embedding and output. An embedding is looked up; the output is a matrix."""
    size = model.vocabulary * model.hidden_size
    return Parameters(size if model.tied_embeddings else 2 * size, size)


def _of_softmax(hidden: int, attention: Attention) -> Parameters:
    keys, values = attention.head_dim, attention.value_size
    projected = (attention.heads + attention.kv_head_count) * keys + attention.kv_head_count * values
    matrices = hidden * (projected + attention.heads * values)
    norms = 2 * keys if attention.head_norms else 0
    return Parameters(matrices + norms + (projected if attention.biases else 0), matrices)


def _of_latent(hidden: int, attention: Attention) -> Parameters | None:
    """Of latent attention: down to the ranks, and up from them; None for other attention."""
    ranks = attention.latent
    if ranks is None:
        return None
    down = hidden * (ranks.query_rank + ranks.kv_rank + ranks.rope_dim)
    of_head = ranks.query_rank * attention.head_dim
    of_head += ranks.kv_rank * (attention.head_dim - ranks.rope_dim + attention.value_size)
    matrices = down + attention.heads * (of_head + attention.value_size * hidden)
    return Parameters(matrices + ranks.query_rank + ranks.kv_rank, matrices)


def _of_linear(hidden: int, attention: Attention, linear: Linear) -> Parameters:
    """Of linear attention: projections, a gate if there is one, and a norm of the results of all heads."""
    keys, values = attention.head_dim, attention.value_size
    projected = attention.heads * keys + (linear.kv_heads or attention.heads) * (keys + values)
    results = attention.heads * values
    matrices = hidden * (projected + results * (2 if linear.gate else 1))
    return Parameters(matrices + results, matrices)


def _following(hidden: int, mlp: MLP | None, experts: Experts | None) -> Parameters:
    """Of experts, or of an MLP."""
    if experts is None:
        size = 0 if mlp is None else hidden * mlp.width * (3 if mlp.gated else 2)
        return Parameters(size, size)
    one, router = 3 * hidden * experts.width, hidden * experts.count
    biases = experts.count if experts.router_biases else 0
    stored, used = (each + experts.shared for each in (experts.count, experts.active))
    return Parameters(stored * one + router + biases, used * one + router)
