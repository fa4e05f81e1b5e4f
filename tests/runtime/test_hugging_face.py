"""Models of transformers on several ranks against the same model with eager attention in one process."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.sequence_parallel.hugging_face import register, shard_batch
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.ranks import on_ranks

transformers = pytest.importorskip("transformers")

IMPORTED_BY_RANKS = tuple(
    f"transformers.models.{kind}.modeling_{kind}"
    for kind in ("llama", "mistral", "qwen2_moe", "bert", "deepseek_v3", "gpt_oss")
)
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2,
    "use_cache": False,
}  # fmt: skip
CONFIGURATIONS = {
    "llama": {},
    "llama, checkpoints": {},
    "llama, cache": {"use_cache": True},
    "mistral": {"sliding_window": 20},
    "qwen2_moe": {  # tells its mask of the window, not its attention
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": {  # keys of 24 elements, values of 16
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {  # sinks, and a window in every second layer
        "head_dim": 16,
        "sliding_window": 20,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    },
    "llama, full": {"is_causal": False},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
SEQUENCE = 67


def model_of(name: str, attention_name: str) -> Any:
    """A small model, the same in every process, in training mode."""
    kind, _, variant = name.partition(", ")
    configuration = transformers.AutoConfig.for_model(kind, **SIZES | CONFIGURATIONS[name])
    of_kind = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = of_kind.from_config(configuration, attn_implementation="eager").train()
    model.set_attn_implementation(attention_name)
    if variant == "checkpoints":
        model.gradient_checkpointing_enable()
    return model


def text_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose labels count in some places only, so not equally many on every rank."""
    drawn = torch.Generator().manual_seed(1)
    text = torch.randint(1, SIZES["vocab_size"], (2, SEQUENCE), generator=drawn)
    return text, text.masked_fill(torch.rand(text.shape, generator=drawn) < 0.3, -100)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def errors_of_rank(name: str, schedule: str, group: Any) -> dict[str, float]:
    """On a rank: the errors of its logits, of the loss and of the gradient of each parameter, over all ranks."""
    schedule, _, groups = schedule.partition(" in ")
    options = AttentionOptions("both", groups=groups or "auto")
    register(schedule=schedule, group=group, options=options)
    text, labels = text_and_labels()
    causal = name not in ("bert", "llama, full")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    workload = Workload(SEQUENCE, mask="causal" if causal else "full", heads=1)
    layout = attention_layout(schedule, workload, world_size, options)
    model, alone = model_of(name, "tasp"), model_of(name, "eager")
    given = labels if causal else None
    batch = shard_batch(text, given, schedule=schedule, group=group, causal=causal, options=options)
    found, expected = model(**batch), alone(input_ids=text, labels=labels)
    if not causal:
        expected.loss, found.loss = expected.logits.square().sum(), found.logits.square().sum()
    found.loss.backward()
    expected.loss.backward()
    errors = {"logits": relative_error(found.logits, shard(expected.logits, layout, rank))}
    summed = {"loss": (found.loss.detach(), expected.loss.detach())}
    for (each, own), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        if not each.endswith("key.bias"):  # adds the same to all scores of a row: its gradient is 0 and rounding
            summed[each] = own.grad, whole.grad
    for each, (own, whole) in summed.items():
        dist.all_reduce(own, group=group)
        errors[each] = relative_error(own, whole)
    return errors


def errors_of_cases(cases: list[tuple[str, str]], group_size: int) -> list[dict[str, float]]:
    """On a rank: every `group_size` ranks share their sequences."""
    groups = [
        dist.new_group(list(range(first, first + group_size))) for first in range(0, dist.get_world_size(), group_size)
    ]
    return [errors_of_rank(*case, groups[dist.get_rank() // group_size]) for case in cases]


CASES = [
    ("llama", "zigzag-ring-attention"),
    ("llama", "tasp"),
    ("mistral", "tasp"),
    ("bert", "tasp"),
    ("deepseek_v3", "ulysses"),
    ("gpt_oss", "tasp"),
]
MORE_CASES = [
    ("llama, checkpoints", "tasp"),
    ("llama, cache", "zigzag-ring-attention"),
    ("llama, full", "tasp"),
    ("qwen2_moe", "zigzag-ring-attention"),
    ("mistral", "zigzag-ring-attention"),
    ("llama", "usp:1x2 in 1|0"),
    ("deepseek_v3", "zigzag-ring-attention"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "group_size", "cases"), [(2, 2, CASES + MORE_CASES), (4, 4, CASES), (4, 2, CASES[:1])]
)
def test_logits_loss_and_gradients_are_those_of_one_process(
    world_size: int, group_size: int, cases: list[tuple[str, str]]
) -> None:
    """In float32, as norms of differences over norms, for each parameter."""
    answers: Any = on_ranks(errors_of_cases, world_size, cases, group_size)
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    for answer in answers:
        for case, errors in zip(cases, answer, strict=True):
            assert max(errors.values()) < 1e-5, (case, errors)


def refusals_of_rank() -> list[Exception | None]:
    """On a rank: what it raises without position_ids, with those of another length, and with what fits."""
    register(schedule="tasp")
    model = model_of("llama", "tasp")
    text, labels = text_and_labels()
    batch = shard_batch(text, labels, schedule="tasp")
    odd = dist.get_rank() == 1
    position_ids = [
        None,  # then the model takes 0, 1, 2, ... on every rank
        batch["position_ids"] % 10,  # as of packed sequences
        batch["position_ids"] + torch.tensor([[0], [1]]) if odd else batch["position_ids"],
        torch.arange(33, SEQUENCE)[None] if odd else torch.arange(33)[None],  # of contiguous shards
        batch["position_ids"],
    ]
    found: list[Exception | None] = []
    for each in position_ids:
        try:
            model(**batch | {"position_ids": each})
            found.append(None)
        except TaspLabError as error:
            found.append(error)
    return found


@pytest.mark.distributed
def test_positions_of_another_shard_are_refused_on_all_ranks() -> None:
    """So the group can still be used afterwards."""
    answers: Any = on_ranks(refusals_of_rank, 2)
    for answer in answers:
        *refused, last = map(str, answer)
        assert last == "None"
        for error, expected in zip(
            refused, ["[0, 1, 2, 3", "[0, 1, 2, 3", "all rows the same", "[0, 1, 2, 3"], strict=True
        ):
            assert "position_ids" in error
            assert expected in error
            assert "\n" not in error


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def call(**changes: Any) -> tuple[torch.Tensor, None]:
    """One call as a layer of a causal model makes it."""
    register()
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    usual = {"query": q, "key": k, "value": k, "attention_mask": None, "dropout": 0.0, "scaling": 0.25}
    implementation = transformers.AttentionInterface()["tasp"]
    return implementation(changes.pop("module", SimpleNamespace(is_causal=True)), **usual | changes)


KEYS = torch.randn(1, 2, 10, 16)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"attention_mask": torch.ones(1, 1, 9, 9)}, "an attention mask of [1, 1, 9, 9], expected none"),
    ({"attention_mask": torch.tensor(5), "sliding_window": 4}, "a window of 4 in a layer, but 5 in its mask"),
    ({"dropout": 0.1}, "attention dropout: 0.1, expected 0"),
    ({"key": KEYS, "value": KEYS}, "9 queries and 10 keys"),
    ({"softcap": 50.0}, "the model passes softcap"),
    ({"s_aux": torch.zeros(5)}, "sinks is [5] of torch.float32 on cpu, expected [4]"),
    ({"position_bias": torch.zeros(1, 4, 9, 9)}, "the model passes position_bias"),
    ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "the model passes cu_seq_lens_q"),
    ({"output_attentions": True}, "the model passes output_attentions"),
    ({"is_causal": False, "sliding_window": 4}, "window: 4 with the mask full, expected a causal mask"),
    ({"value": torch.randn(1, 1, 9, 16)}, "expected equal batch"),
    ({"position_ids": torch.arange(9)}, "position_ids of [9], expected [batch, positions]"),
    ({"module": SimpleNamespace(config=SimpleNamespace(rope_parameters={"rope_type": "dynamic"}))}, "'dynamic'"),
    ({"module": SimpleNamespace(config=SimpleNamespace(rope_parameters={"full": {"rope_type": "longrope"}}))}, "'long"),
])  # fmt: skip
@pytest.mark.usefixtures("group_of_one")
def test_what_a_layer_cannot_do_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        call(**changes)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("group_of_one")
def test_a_layer_with_nothing_special_is_computed() -> None:
    """Softcap None, a cache that is off and so on are no reason to refuse."""
    out, weights = call(softcap=None, output_attentions=False, use_cache=True, position_ids=torch.arange(9)[None])
    assert out.shape == (1, 9, 4, 16)
    assert weights is None


@pytest.mark.parametrize(("kind", "changes", "expected"), [
    ("llama", {"attention_mask": torch.tensor([[1] * 8 + [0]])}, "some positions are masked (padding)"),
    ("llama", {"attention_mask": torch.ones(1, 12)}, "9 queries and 12 keys"),
    ("llama4_text", {}, "the model has a custom mask"),  # chunks
    ("gemma3_text", {"use_bidirectional_attention": True}, "the model has a custom mask"),
    ("gemma2", {}, "the model passes softcap"),
])  # fmt: skip
@pytest.mark.usefixtures("group_of_one")
def test_what_a_model_cannot_do_is_refused(kind: str, changes: dict[str, Any], expected: str) -> None:
    register()
    of_configuration = {name: changes[name] for name in changes if name.startswith("use_")}
    configuration = transformers.AutoConfig.for_model(kind, **SIZES | of_configuration)
    model = transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation="tasp")
    with pytest.raises(WorkloadError) as caught:
        model(
            torch.ones(1, 9, dtype=torch.int64), **{name: changes[name] for name in changes.keys() - of_configuration}
        )
    assert expected in str(caught.value)


def test_blocks_that_see_all_of_themselves_are_refused() -> None:
    register()
    create_causal_mask = importlib.import_module("transformers.masking_utils").create_causal_mask
    arguments = {"inputs_embeds": torch.zeros(1, 9, 64), "attention_mask": None, "past_key_values": None}
    config = model_of("llama", "tasp").config
    assert create_causal_mask(config, **arguments) is None
    with pytest.raises(WorkloadError, match="a custom mask"):
        create_causal_mask(config, **arguments, block_sequence_ids=torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(WorkloadError, match="a custom mask"):
        create_causal_mask(config, **arguments, and_mask_function=lambda *_: torch.tensor(True))


@pytest.mark.usefixtures("group_of_one")
def test_a_second_token_from_the_cache_is_refused() -> None:
    register()
    model = model_of("llama, cache", "tasp")
    first = model(torch.ones(1, 9, dtype=torch.int64))
    with pytest.raises(WorkloadError, match="1 queries and 10 keys"):
        model(torch.ones(1, 1, dtype=torch.int64), past_key_values=first.past_key_values)


@pytest.mark.usefixtures("group_of_one")
def test_dropout_is_refused_in_training_only() -> None:
    register()
    model = model_of("llama", "tasp")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    text = torch.ones(1, 9, dtype=torch.int64)
    model.eval()(text)
    with pytest.raises(WorkloadError, match=r"dropout: 0\.1"):
        model.train()(text)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": 3}, {"scale": 1.0}, {"cu_seqlens": [0, 9]}, {"cached_keys": 4}]
)
def test_what_the_model_says_is_no_option(options: Any) -> None:
    with pytest.raises(WorkloadError, match="expected none, since"):
        register(**options)


@pytest.mark.parametrize("name", ["", "sdpa", "eager", "flash_attention_2", "someone/kernel"])
def test_names_that_mean_something_to_transformers_are_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="expected one without"):
        register(name)


def test_without_transformers_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunError, match="transformers cannot be imported"):
        register()


def test_without_a_process_group_there_is_one_line() -> None:
    text = torch.ones(1, 9, dtype=torch.int64)
    with pytest.raises(RunError, match="init_process_group"):
        shard_batch(text)
    with pytest.raises(RunError, match="init_process_group"):
        call(position_ids=torch.arange(9)[None])


@pytest.mark.usefixtures("group_of_one")
def test_a_batch_that_cannot_be_sharded_is_refused() -> None:
    text = torch.ones(2, 9, dtype=torch.int64)
    for arguments, options in [((text[0],), {}), ((text, text[:, 1:]), {}), ((text, text), {"causal": False})]:
        with pytest.raises(WorkloadError, match="expected"):
            shard_batch(*arguments, **options)
    with pytest.raises(WorkloadError, match="9 positions, but the layout is for 8"):
        shard_batch(text, schedule=attention("tasp", full_mesh(1), Workload(8, mask="causal", heads=1)))
    with pytest.raises(WorkloadError, match="for 2 ranks, expected 1"):
        shard_batch(text, schedule=attention("tasp", full_mesh(2), Workload(9, mask="causal", heads=1)))


@pytest.mark.usefixtures("group_of_one")
def test_a_schedule_may_be_given_as_an_object() -> None:
    workload = Workload(9, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")
    schedule = attention_passes("tasp", full_mesh(1), workload)
    register("tasp-object", schedule=schedule)
    text = torch.arange(9)[None]
    batch = shard_batch(text, text, schedule=schedule)
    found, expected = (model_of("llama", name)(**batch).loss.detach() for name in ("tasp-object", "eager"))
    torch.testing.assert_close(found, expected)


def train_as_documented() -> tuple[float, float]:
    """On a rank: the code of the page, and the loss of one process after the same step."""
    text, labels = text_and_labels()
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text()
    model_at_hand = model_of("llama", "eager")
    names = {"configuration": deepcopy(model_at_hand.config), "input_ids": text, "labels": labels}
    torch.manual_seed(0)
    for code in re.findall("```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    optimizer = torch.optim.AdamW(model_at_hand.parameters(), lr=1e-3)
    loss = model_at_hand(input_ids=text, labels=labels).loss
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        after = [names["model"](**names["batch"]).loss, model_at_hand(input_ids=text, labels=labels).loss]
    dist.all_reduce(after[0])
    return names["loss"].item() - loss.item(), (after[0] - after[1]).item()


@pytest.mark.distributed
def test_the_page_trains_as_one_process_does() -> None:
    answers: Any = on_ranks(train_as_documented, 2)
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    for answer in answers:
        assert answer == pytest.approx((0, 0), abs=1e-4)
