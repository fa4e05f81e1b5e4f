"""How many parameters a model has, and how many of them multiply each token.

A matrix costs a token two FLOPs per parameter, forward; biases and norms are counted, but cost next to nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tasp_lab.workload.models.model import Linear, Model


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
    kinds = zip(model.pattern, model.expert_layers, strict=True)
    return [layer_of(model, letter, has_experts=has_experts) for letter, has_experts in kinds]


@lru_cache(maxsize=256)
def layer_of(model: Model, letter: str, *, has_experts: bool) -> Parameters:
    """The parameters of a layer: attention, by its letter, and an MLP or experts, and a norm before each."""
    hidden = model.hidden_size
    mlp, experts = sum(inputs * outputs for inputs, outputs in mlp_matrices(model)), model.experts
    following = Parameters(mlp, mlp)
    if has_experts and experts is not None:
        one, router = 3 * hidden * experts.width, hidden * experts.count
        stored, used = (each + experts.shared for each in (experts.count, experts.active))
        biases = experts.count if experts.router_biases else 0
        following = Parameters(stored * one + router + biases, used * one + router)
    return attention_parameters(model, letter) + following + Parameters(2 * hidden, 0)


def attention_parameters(model: Model, letter: str) -> Parameters:
    """The parameters of the projections of a layer, by its letter, with their biases and norms."""
    attention, ranks = model.attention, model.attention.latent
    shapes = attention_matrices(model, letter)
    matrices = sum(inputs * outputs for inputs, outputs in shapes)
    if letter == "L":
        beside = attention.heads * attention.value_size  # a norm of the results of all heads
    elif ranks is not None:
        beside = ranks.query_rank + ranks.kv_rank
    else:
        beside = 2 * attention.head_dim if attention.head_norms else 0
        beside += sum(outputs for _, outputs in shapes[:-1]) if attention.biases else 0
    return Parameters(matrices + beside, matrices)


@lru_cache(maxsize=256)
def attention_matrices(model: Model, letter: str) -> tuple[tuple[int, int], ...]:
    """The inputs and outputs of each matrix of a layer's attention, by its letter, in the order of their use.

    >>> from tasp_lab.workload.models.catalogue import load_model
    >>> attention_matrices(load_model("llama-3-8b"), "S")
    ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096))
    """
    hidden, attention = model.hidden_size, model.attention
    heads, keys, values = attention.heads, attention.head_dim, attention.value_size
    results = (heads * values, hidden)
    ranks, linear = attention.latent, model.linear or Linear()
    if letter != "L" and ranks is not None:
        # latent attention: down to the ranks, and up from them
        return (
            (hidden, ranks.query_rank),
            (ranks.query_rank, heads * keys),
            (hidden, ranks.kv_rank + ranks.rope_dim),
            (ranks.kv_rank, heads * (keys - ranks.rope_dim + values)),
            results,
        )
    kv_heads = linear.kv_heads or heads if letter == "L" else attention.kv_head_count
    gate = ((hidden, heads * values),) if letter == "L" and linear.gate else ()
    return (hidden, heads * keys), (hidden, kv_heads * keys), (hidden, kv_heads * values), *gate, results


def mlp_matrices(model: Model) -> tuple[tuple[int, int], ...]:
    """The inputs and outputs of each matrix of an MLP, if there is one; the last one leads back to the hidden state."""
    if model.mlp is None:
        return ()
    hidden, width = model.hidden_size, model.mlp.width
    return ((hidden, width),) * (2 if model.mlp.gated else 1) + ((width, hidden),)


def embedding_parameters(model: Model) -> Parameters:
    """The parameters of embedding and output. An embedding is looked up; the output is a matrix."""
    size = model.vocabulary * model.hidden_size
    return Parameters(size if model.tied_embeddings else 2 * size, size)
