"""Sequence-parallel attention for the models of Hugging Face transformers.

transformers looks up the attention of a model by name. `register` adds one name; a model that is set to it attends by
`runtime.attention`, every rank with its shard of each sequence, and everything else in the model runs on the shard
as it is. `shard_batch` makes the shard. After ``register(schedule="tasp")`` on every rank::

    model.set_attn_implementation("tasp")
    loss = model(**shard_batch(input_ids, labels, schedule="tasp")).loss
    loss.backward()

The losses of all ranks add up to the loss of the whole batch, and so do the gradients of every parameter.

What this attention cannot do is refused with `WorkloadError`, nothing is left out silently. Written against
transformers 5.23 (`AttentionInterface`, `AttentionMaskInterface`, and the arguments of their functions).
"""

from __future__ import annotations

import hashlib
import importlib
import weakref
from collections.abc import Callable, Mapping
from typing import Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.executor.messages import Group
from runtime.sequence_parallel.agreement import Proposal, agree
from runtime.sequence_parallel.api import CallKeywords, attention, check_keywords
from runtime.sequence_parallel.arguments import TIMEOUT_S, TYPES, check_tensor, process_group
from runtime.sequence_parallel.calls import BOTH_PASSES
from runtime.sequence_parallel.sharding import positions, shard
from tasp_lab.core.arguments import check_arguments
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import RunError, WorkloadError, of_type
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

IGNORED_LABEL = -100
"""What transformers and `torch.nn.functional.cross_entropy` leave out of the loss: its default ``ignore_index``."""

_NO_KEYWORDS = {
    "causal": "the model determines it",
    "window": "the model determines it",
    "scale": "the model determines it",
    "cu_seqlens": "every batch would need its own",
    "ranges": "every batch would need its own",
    "cached_keys": "a model passes as many keys as queries",
    "sinks": "the model passes its own",
}

_TAKEN = ("eager", "sdpa", "flash", "flex", "paged", "/", "|")
"""transformers gives names with these in them a meaning of its own."""

_WITHOUT_EFFECT = frozenset({
    "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch", "shift_labels",
})  # fmt: skip
"""What models pass on to their attention though it is meant for other parts of them."""

_PLAIN_MASKS = frozenset({"causal_mask_function", "bidirectional_mask_function", "and_mask"})
"""Names of mask functions in transformers: ``and_mask`` is a window, or what it takes for packed sequences."""


def register(name: str = "tasp", **keywords: Unpack[CallKeywords]) -> None:
    """Make sequence-parallel attention known to transformers; a name can be registered again with other keywords.

    Parameters
    ----------
    name : what ``attn_implementation`` and ``model.set_attn_implementation`` then take.
    keywords : as `runtime.attention` takes them (`options` is one of them), but for ``causal``, ``window``, ``scale``
        and ``sinks``, which the model sets, ``cu_seqlens``: no packed batches, and ``cached_keys``: no cache.

    Raises `RunError` without transformers, and `WorkloadError` for a name or a keyword that cannot be.
    """
    for keyword, why in _NO_KEYWORDS.items():
        if keyword in keywords:
            raise WorkloadError(f"{keyword}: {keywords.get(keyword)}, expected none, since {why}")
    check_keywords(keywords)
    if not isinstance(name, str):
        raise WorkloadError(of_type("name", name, "a text"))
    if not name or any(word in name for word in _TAKEN):
        raise WorkloadError(
            f"name: {name!r}, expected one without {', '.join(_TAKEN)}, which mean others to transformers"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise RunError(
            f"transformers cannot be imported ({error}), expected tasp-lab[transformers] installed"
        ) from None
    transformers.AttentionInterface.register(name, _ModelAttention(keywords))
    transformers.AttentionMaskInterface.register(name, _mask)


def shard_batch(
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    schedule: str | Schedule | Passes = "tasp",
    group: Group | DeviceMesh = None,
    causal: bool = True,
    options: AttentionOptions = BOTH_PASSES,
) -> dict[str, torch.Tensor]:
    """What this rank passes to its model, from a batch that is the same on all ranks of the group.

    Parameters
    ----------
    input_ids : [batch, sequence]. No padding; under a causal mask padding behind the text does no harm, since no
        text sees it, if its labels are -100.
    labels : [batch, sequence], of a causal model, as transformers takes them: those that are -100 don't count.
    schedule, group, options : as given to `register`.
    causal : whether the model is causal.

    Returns
    -------
    ``input_ids`` and ``position_ids``, [batch, positions of this rank]. With labels also ``shift_labels``, those of
    the next position, over the borders of shards; ``num_items_in_batch``, how many of them count on all ranks
    together, by which each rank divides its loss; and ``labels``, all -100: without labels there is no loss, and a
    model that does not read ``shift_labels`` gets none but nan.

    Raises `WorkloadError` for tensors of another shape, for a schedule of another length and for labels of a model
    that is not causal; `RunError` without a process group.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> text = torch.tensor([[5, 6, 7]])
    >>> {name: each.tolist() for name, each in shard_batch(text, labels=text).items()}  # doctest: +NORMALIZE_WHITESPACE
    {'input_ids': [[5, 6, 7]], 'position_ids': [[0, 1, 2]], 'shift_labels': [[6, 7, -100]],
     'labels': [[-100, -100, -100]], 'num_items_in_batch': 2}
    >>> dist.destroy_process_group()
    """
    check_arguments({"schedule": schedule, "causal": causal, "options": options}, TYPES)
    check_tensor("input_ids", input_ids)
    if labels is not None:
        check_tensor("labels", labels)
    if input_ids.dim() != 2 or (labels is not None and labels.shape != input_ids.shape):
        shapes = [list(each.shape) for each in (input_ids, labels) if each is not None]
        raise WorkloadError(f"input_ids and labels are {shapes}, expected [batch, sequence], both the same")
    if labels is not None and not causal:
        raise WorkloadError("labels of a model that is not causal, expected none: its loss is a mean over one shard")
    rank, world_size = _place(process_group(group))
    layout = _layout(schedule, input_ids.shape[1], world_size, causal, options)
    here = positions(layout, rank, input_ids.device).expand(len(input_ids), -1)
    batch = {"input_ids": shard(input_ids, layout, rank), "position_ids": here}
    if labels is not None:
        next_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        batch["shift_labels"] = shard(next_labels, layout, rank)
        batch["labels"] = torch.full_like(batch["shift_labels"], IGNORED_LABEL)
        batch["num_items_in_batch"] = (next_labels != IGNORED_LABEL).sum()
    return batch


class _ModelAttention:
    """Attention in the form in which transformers calls it."""

    def __init__(self, keywords: CallKeywords) -> None:
        self.keywords = keywords
        self._checked: dict[bool, weakref.ref[torch.Tensor]] = {}  # causal or not: the last position_ids

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_ids: torch.Tensor | None = None,
        s_aux: torch.Tensor | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        """[batch, positions, heads, head_dim], from query, key and value as [batch, heads, positions, head_dim]."""
        window = _window(attention_mask, sliding_window)
        if dropout:
            raise WorkloadError(f"attention dropout: {dropout}, expected 0")
        _demand_equal_lengths(query.shape[2], key.shape[2])
        _demand_nothing_more(others)
        _demand_local_rotation(module)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if position_ids is not None:
            self._demand_positions(position_ids, causal)
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        keywords: CallKeywords = {
            **self.keywords, "causal": causal, "window": window, "scale": scaling, "sinks": s_aux
        }  # fmt: skip
        return attention(q, k, v, **keywords), None

    def _demand_positions(self, position_ids: torch.Tensor, causal: bool) -> None:
        """Raise on all ranks unless each has the positions of its shard; once for a tensor, which all layers share."""
        if causal in self._checked and self._checked[causal]() is position_ids:
            return
        group = process_group(self.keywords.get("group"))
        _, world_size = _place(group)
        own, timeout_s = _said(position_ids), self.keywords.get("timeout_s", TIMEOUT_S)
        everyone = agree(own, group, timeout_s, apart=("length", "digest", "first"))
        sequence = sum(int(str(each["length"])) for each in everyone)
        schedule, options = self.keywords.get("schedule", "tasp"), self.keywords.get("options", BOTH_PASSES)
        layout = _layout(schedule, sequence, world_size, causal, options)
        for rank, each in enumerate(everyone):
            if each["digest"] != _digest(layout.positions(rank)):
                raise WorkloadError(
                    f"rank {rank}: position_ids {each['first']}... are not the {layout.length(rank)} positions of "
                    f"its shard of {sequence} ({layout.name}), expected what shard_batch gives"
                )
        self._checked[causal] = weakref.ref(position_ids)


def _mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., object],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: object = None,
    **_: object,
) -> torch.Tensor | None:
    """In the place of a mask: None, or the window as a tensor without dimensions, since some models pass it only here.

    Positions that are not 0, 1, 2, ..., as those of a shard, look like packed sequences to transformers, and
    `mask_function` then knows that. It is not called: whether they are packed is what `_ModelAttention` finds out.
    """
    _demand_equal_lengths(q_length, kv_length)
    if attention_mask is not None and not bool(attention_mask.all()):
        raise WorkloadError("attention_mask: some positions are masked (padding), expected none or all ones")
    window = getattr(config, "sliding_window", None)
    if use_vmap or getattr(mask_function, "__name__", None) not in _PLAIN_MASKS or local_size not in (None, window):
        raise WorkloadError("the model has a custom mask, expected a causal mask, a full mask or a sliding window")
    return None if local_size is None else torch.tensor(local_size, device="cpu")


def _window(attention_mask: torch.Tensor | None, sliding_window: int | None) -> int | None:
    """The window, from the mask or the layer; an error if they differ."""
    if attention_mask is None:
        return sliding_window
    if attention_mask.dim():
        raise WorkloadError(f"an attention mask of {list(attention_mask.shape)}, expected none")
    if sliding_window not in (None, int(attention_mask)):
        raise WorkloadError(
            f"a window of {sliding_window} in a layer, but {int(attention_mask)} in its mask, expected equal windows"
        )
    return int(attention_mask)


def _demand_equal_lengths(queries: int, keys: int) -> None:
    if queries != keys:
        raise WorkloadError(
            f"{queries} queries and {keys} keys, expected equally many: no past key values, no other sequence"
        )


def _demand_nothing_more(others: Mapping[str, object]) -> None:
    """Raise for what changes attention, and for what might."""
    for name, value in others.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise WorkloadError(f"the model passes {name} to its attention, which tasp-lab cannot do, expected none")


def _demand_local_rotation(module: torch.nn.Module) -> None:
    """Raise for rotary embeddings whose frequencies depend on the last position: it is another one on each rank."""
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # some models have one for each type of layer
        kind = each.get("rope_type") if isinstance(each, Mapping) else None
        if kind is not None and ("dynamic" in kind or kind == "longrope"):
            raise WorkloadError(f"rope_type: {kind!r} depends on the length of a shard, expected one that does not")


def _layout(
    schedule: str | Schedule | Passes, sequence: int, world_size: int, causal: bool, options: AttentionOptions
) -> SequenceLayout:
    if isinstance(schedule, str):
        workload = Workload(sequence, mask="causal" if causal else "full")
        return attention_layout(schedule, workload, world_size, options)
    task = (schedule.forward if isinstance(schedule, Passes) else schedule).task
    if not isinstance(task, AttentionTask):
        raise WorkloadError("the schedule computes no attention, expected one that does")
    if task.layout.world_size != world_size:
        raise WorkloadError(f"the schedule is for {task.layout.world_size} ranks, expected {world_size}")
    return task.layout


def _place(group: Group) -> tuple[int, int]:
    """This rank in its group, and how many there are. Raises `RunError`."""
    if not dist.is_initialized() or dist.get_rank(group) < 0:
        raise RunError("this process is in no process group, expected torch.distributed.init_process_group before")
    return dist.get_rank(group), dist.get_world_size(group)


def _said(position_ids: torch.Tensor) -> Proposal | WorkloadError:
    """The description of a rank's positions for the other ranks."""
    found = position_ids.cpu().numpy()
    if found.ndim != 2 or (found != found[:1]).any():
        return WorkloadError(f"position_ids of {list(found.shape)}, expected [batch, positions], all rows the same")
    return {"length": found.shape[1], "digest": _digest(found[0]), "first": str(found[0, :4].tolist())[:-1]}


def _digest(shard_positions: IntArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(shard_positions, dtype=np.int64).tobytes()).hexdigest()
