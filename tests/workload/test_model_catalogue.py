"""Models by name and from files, their parameter counts against those published, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasp_lab import load_model
from tasp_lab.core.errors import ModelError, WorkloadError
from tasp_lab.schedules.build import hybrid_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.models.catalogue import model_names
from tasp_lab.workload.models.parameters import active_parameters, layer_parameters, parameter_count

MINE = """
summary = "mine"
source = "my own"
layers = 2
hidden_size = 64
vocabulary = 100

[attention]
heads = 4
head_dim = 16

[mlp]
width = 128
gated = false
"""


def published(text: str) -> tuple[float, float]:
    """A stated number, and one unit of its last digit: makers round, or cut off."""
    digits = text.removesuffix("B")
    return float(digits) * 1e9, 10.0 ** -len(digits.partition(".")[2]) * 1e9


@pytest.mark.parametrize("name", model_names())
def test_parameter_counts_are_those_published(name: str) -> None:
    model = load_model(name)
    assert model.published is not None
    number, unit = published(model.published.parameters)
    assert abs(parameter_count(model) - number) < unit
    if model.published.active is not None:
        number, unit = published(model.published.active)
        assert abs(active_parameters(model) - number) < unit


@pytest.mark.parametrize("name", model_names())
def test_every_model_names_its_source_and_makes_a_layer(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert "/" in model.source
    layer = model.layer(8192, 2)
    assert (layer.sequence, layer.batch, layer.mask) == (8192, 2, "causal")
    assert len(layer_parameters(model)) == len(model.pattern)


def test_a_hybrid_makes_a_period_whose_linear_layers_have_kv_heads_of_their_own() -> None:
    layer = load_model("minimax-text-01").layer(4096)
    assert layer.layers == "LLLLLLLS"
    assert (layer.of("L").kv_heads, layer.of("S").kv_heads) == (64, 8)
    assert (layer.of("L").decay, layer.of("S").decay) == ("head", "none")


def test_states_of_linear_layers_are_sent_with_all_their_kv_heads() -> None:
    """LASP-2 gathers a state of head_dim squared per KV head of a linear layer."""
    few = Workload(64, heads=4, kv_heads=1, head_dim=8, kind="hybrid", layers="LL", mask="full")
    many = Workload(64, heads=4, kv_heads=1, head_dim=8, kind="hybrid", layers="LL", linear_kv_heads=4, mask="full")
    schedules = [hybrid_schedules("lasp-2+ulysses", full_mesh(4), layer)[0] for layer in (few, many)]
    one, four = (int(each.bytes_sent().sum()) for each in schedules)
    assert four == 4 * one


@pytest.mark.parametrize(("kind", "heads"), [("softmax", 4), ("hybrid", 3), ("hybrid", 0)])
def test_linear_kv_heads_belong_to_hybrids_and_divide_the_heads(kind: str, heads: int) -> None:
    layers = "LS" if kind == "hybrid" else ""
    with pytest.raises(WorkloadError, match="linear KV heads"):
        Workload(64, heads=4, kind=kind, layers=layers, linear_kv_heads=heads, mask="full")  # type: ignore[arg-type]


def test_latent_attention_has_the_heads_of_its_expanded_form() -> None:
    """Queries and keys of 128 + 64 elements, values and results of 128 (arXiv:2412.19437, section 4.2)."""
    layer = load_model("deepseek-v3").layer(4096)
    assert layer == Workload(4096, heads=128, head_dim=128 + 64, value_dim=128, mask="causal")
    assert load_model("deepseek-v3").layer(4096, value_dim=192).kv_bytes_per_position == 2 * 128 * 192 * 2


def test_a_layer_changes_as_a_study_asks() -> None:
    layer = load_model("llama-3-8b").layer(1024, kv_heads=1, window=128)
    assert (layer.heads, layer.kv_heads, layer.window) == (32, 1, 128)
    with pytest.raises(WorkloadError, match="unknown field of a layer 'kv_head', did you mean 'kv_heads'"):
        load_model("llama-3-8b").layer(1024, kv_head=1)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """Two layers of four matrices of attention and two of the MLP, norms, embedding and output."""
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    model = load_model(str(path))
    assert model.name == "mine"
    assert parameter_count(model) == 2 * (4 * 64 * 64 + 2 * 64 * 128 + 2 * 64) + 64 + 2 * 100 * 64
    assert model.layer(128) == Workload(128, heads=4, kv_heads=4, head_dim=16, mask="causal")


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("tied_embeddings = true\n" + MINE)
    tied = load_model(str(path))
    path.write_text(MINE)
    assert parameter_count(load_model(str(path))) - parameter_count(tied) == 100 * 64
    assert active_parameters(load_model(str(path))) == active_parameters(tied)


@pytest.mark.parametrize(
    ("find", "put", "message"),
    [
        ("heads = 4\n", "", "missing required field `heads`"),
        ("heads = 4\n", "heads = 4\nkv_heads = 3\n", "4 heads are not a multiple of 3 KV heads"),
        ("heads = 4", "heads = 0", "heads"),
        ("heads = 4", 'heads = "4"', "heads"),
        ("layers = 2", "layers = 5000", "layers"),
        ("layers = 2", 'layers = "2xLX"', "unknown layer 'X'"),
        ("layers = 2", 'layers = "WS"', "layers W without a window"),
        (
            "layers = 2\nhidden_size = 64\nvocabulary = 100\n\n[attention]",
            'layers = "2xW"\nhidden_size = 64\nvocabulary = 100\n\n[attention]\nwindow = 8',
            "expected S for the others",
        ),
        ("layers = 2", "layers = -1", "layers"),
        ("head_dim = 16", "head_dim = 16\nvalue_dim = 0", "value_dim"),
        ("head_dim = 16", "head_dim = 16\nlatent = {query_rank = 8, kv_rank = 8, rope_dim = 16}", "rope_dim: 16"),
        ("[mlp]\nwidth = 128\ngated = false\n", "", r"no \[mlp\]"),
        ("[mlp]", "[experts]\ncount = 2\nactive = 3\nwidth = 8\n\n[mlp]", "3 active experts of 2"),
        ("[mlp]", "[experts]\ncount = 2\nactive = 1\nwidth = 8\ndense_layers = 3\n\n[mlp]", "3 dense layers of 2"),
        ("[mlp]", '[linear]\ndecay = "head"\n\n[mlp]', "without linear layers"),
        ("summary", "sumary", "sumary"),
        ("hidden_size = 64", "hidden_size = 99999999999999", "hidden_size"),
        ("layers = 2", "layers = ", "Invalid"),
        ("my own", "\\u0007", "character"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, find: str, put: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    assert find in MINE
    path.write_text(MINE.replace(find, put, 1))
    with pytest.raises(ModelError, match=f"^file '{re.escape(str(path))}'.*{message}") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown model 'lama-3-8b', did you mean 'llama-3-8b'"):
        load_model("lama-3-8b")
    for text in (str(tmp_path / "none.toml"), str(tmp_path), f"{tmp_path}/\0.toml"):
        with pytest.raises(ModelError, match="cannot be read"):
            load_model(text)
    for content in (b"", b"\xff\xfe", b"\x00"):
        (tmp_path / "mine.toml").write_bytes(content)
        with pytest.raises(ModelError, match=r"mine\.toml"):
            load_model(str(tmp_path / "mine.toml"))
