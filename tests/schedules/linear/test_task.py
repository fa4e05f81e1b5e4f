"""The task of linear attention: its blocks, the parts that calls yield, and the calls that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.linear.task import (
    CHUNK_GRADIENTS,
    CHUNK_STATES,
    GATE_GRADIENTS,
    GATES,
    KEY_GRADIENTS,
    KEYS,
    PREFIX_STATES,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    SUFFIX_GRADIENTS,
    LinearTask,
)
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous, striped

Block = tuple[int, int, int]
"""Tensor, chunk and piece."""

CHANNEL = Workload(40, batch=2, heads=4, kv_heads=2, head_dim=8, mask="causal", kind="linear", decay="channel")
PLAIN = replace(CHANNEL, decay="none")


SEGMENTS = ((0, 2), (1, 3), (1, 4), (0, 3))
"""Numbers 4 to 7, behind the four chunks."""


def task_of(layer: Workload, *, backward: bool = False, pieces: int = 1) -> LinearTask:
    """Four chunks, under a causal mask with further segments."""
    segments = SEGMENTS if layer.mask == "causal" else ()
    layout = contiguous(layer.sequence, 4)
    return LinearTask(layer, layout, (), "fp32" if backward else None, pieces, segments=segments)


def effects(task: LinearTask, kernel: str, operands: list[list[Block]], *params: int) -> list[tuple[Block, int]]:
    columns = list(zip(task.tensor.tolist(), task.segment.tolist(), task.piece.tolist(), strict=True))
    blocks = [[columns.index(block) for block in each] for each in operands]
    found = task.effects(Calls.of(kernel, [(0, blocks, list(params))]))
    return sorted((columns[block], part) for block, part in zip(found.block.tolist(), found.part.tolist(), strict=True))


def one(tensor: int, chunk: int) -> list[Block]:
    return [(tensor, chunk, 0)]


def test_forward_effects_are_parts_per_chunk() -> None:
    task = task_of(CHANNEL, pieces=2)
    q, k, g = ([(tensor, 2, 0)] for tensor in (QUERIES, KEYS, GATES))
    states = [(PREFIX_STATES, 2, 0), (PREFIX_STATES, 2, 1)]
    assert effects(task, "make_state", [k, g]) == [((CHUNK_STATES, 2, piece), 0) for piece in (0, 1)]
    assert effects(task, "attend", [q, k, g], 0) == [((RESULTS, 2, 0), 2)]
    assert effects(task, "apply_state", [q, states, g]) == [((RESULTS, 2, 0), 0), ((RESULTS, 2, 0), 1)]
    listed = [(CHUNK_STATES, chunk, piece) for chunk in (1, 2) for piece in (0, 1)]
    assert effects(task, "fold", [listed], 3) == [
        ((PREFIX_STATES, 3, piece), part) for piece in (0, 1) for part in (1, 2)
    ]
    assert effects(task, "advance", [[states[1]], [(CHUNK_STATES, 2, 1)]]) == [
        ((PREFIX_STATES, 3, 1), part) for part in range(3)
    ]
    assert effects(task, "advance", [[], [(CHUNK_STATES, 0, 1)]]) == [((PREFIX_STATES, 1, 1), 0)]


def test_backward_effects_mirror_them() -> None:
    task = task_of(CHANNEL, backward=True)
    q, k, g, s, t = (one(tensor, 1) for tensor in (QUERIES, KEYS, GATES, PREFIX_STATES, SUFFIX_GRADIENTS))
    assert effects(task, "make_gradient_state", [q, g]) == [((CHUNK_GRADIENTS, 1, 0), 0)]
    assert effects(task, "differentiate", [q, k, s, g]) == [
        ((KEY_GRADIENTS, 1, 0), 0),  # the first of the chunks from 1 on
        *(((QUERY_GRADIENTS, 1, 0), part) for part in (0, 1)),
        ((GATE_GRADIENTS, 1, 0), 0),
    ]
    assert effects(task, "apply_gradient_state", [k, t, s, g]) == [
        *(((KEY_GRADIENTS, 1, 0), part) for part in (1, 2)),
        ((GATE_GRADIENTS, 1, 0), 1),
    ]
    assert effects(task, "fold_back", [[(CHUNK_GRADIENTS, 2, 0), (CHUNK_GRADIENTS, 3, 0)]], 1) == [
        ((SUFFIX_GRADIENTS, 1, 0), part) for part in (0, 1)
    ]
    assert effects(task, "retreat", [t, one(CHUNK_GRADIENTS, 1)]) == [
        ((SUFFIX_GRADIENTS, 0, 0), part) for part in range(3)
    ]
    plain = task_of(PLAIN, backward=True)
    assert effects(plain, "differentiate_tile", [one(QUERIES, 3), one(KEYS, 1)], 20) == [
        ((KEY_GRADIENTS, 1, 0), 2),
        ((QUERY_GRADIENTS, 3, 0), 1),
    ]
    assert effects(plain, "apply_gradient_state", [k, t]) == [((KEY_GRADIENTS, 1, 0), part) for part in (1, 2)]


def test_states_of_segments_are_made_of_neighbours() -> None:
    """A fold has the parts of all chunks of its segments, so each of them is in a prefix state once."""
    task = task_of(CHANNEL, pieces=2)

    def pieces(tensor: int, segment: int) -> list[Block]:
        return [(tensor, segment, piece) for piece in (0, 1)]

    for first, second, whole in ((0, 1, 4), (1, 2, 5), (5, 3, 6), (4, 2, 7), (0, 5, 7)):
        found = effects(task, "combine", [pieces(CHUNK_STATES, first), pieces(CHUNK_STATES, second)])
        assert found == [(block, 0) for block in pieces(CHUNK_STATES, whole)]
    assert effects(task, "fold", [[*pieces(CHUNK_STATES, 0), *pieces(CHUNK_STATES, 5)]], 3) == [
        ((PREFIX_STATES, 3, piece), part) for piece in (0, 1) for part in (0, 1, 2)
    ]
    back = task_of(PLAIN, backward=True)
    assert effects(back, "combine_back", [one(CHUNK_GRADIENTS, 3), one(CHUNK_GRADIENTS, 5)]) == [
        ((CHUNK_GRADIENTS, 6, 0), 0)
    ]
    assert effects(back, "fold_back", [one(CHUNK_GRADIENTS, 6)], 0) == [
        ((SUFFIX_GRADIENTS, 0, 0), part) for part in (0, 1, 2)
    ]


@pytest.mark.parametrize("segments", [((0, 1),), ((-1, 2),), ((0, 5),), ((2, 1),), ((0, 2), (0, 2))])
def test_segments_are_of_two_or_more_chunks(segments: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ScheduleError, match=r"expected two or more of 4 chunks|expected each once"):
        LinearTask(PLAIN, contiguous(40, 4), segments=segments)
    with pytest.raises(ScheduleError, match="expected two or more of 4 chunks of a causal layer"):
        LinearTask(replace(PLAIN, mask="full"), contiguous(40, 4), segments=((0, 2),))


def test_nothing_crosses_the_start_of_a_document() -> None:
    """Chunks of 10 positions; documents start within chunk 1, and at the first position of chunk 3."""
    task = task_of(replace(PLAIN, documents=(13, 17, 10)))
    assert task.first.tolist() == [0, 0, 1, 3]
    assert task.last.tolist() == [1, 2, 2, 3]
    assert task.has_prefix.tolist() == [False, True, True, False]
    assert task.resets(1).tolist() == [3]
    assert effects(task, "advance", [[], one(CHUNK_STATES, 1)]) == [((PREFIX_STATES, 2, 0), 0)]
    with pytest.raises(ScheduleError, match=r"advance of blocks .* where .* are expected"):
        effects(task, "advance", [one(PREFIX_STATES, 1), one(CHUNK_STATES, 1)])
    for kernel, operands, params in (
        ("attend", [one(QUERIES, 2), one(KEYS, 0)], [20]),
        ("fold", [[(CHUNK_STATES, 0, 0), (CHUNK_STATES, 1, 0)]], [2]),
        ("advance", [one(PREFIX_STATES, 2), one(CHUNK_STATES, 2)], []),
    ):
        with pytest.raises(ScheduleError, match=r"does not attend to|with others in between|no such state"):
            effects(task, kernel, operands, *params)


@pytest.mark.parametrize(
    ("kernel", "operands", "params", "message"),
    [
        ("differentiate", [], [], "unknown kernel 'differentiate', expected one of make_state, attend, "),
        ("make_state", [one(QUERIES, 0)], [], "without keys"),
        ("make_state", [[]], [], "without keys"),
        ("make_state", [[(KEYS, 0, 0), (KEYS, 1, 0)]], [], r"where \[\[0\]\] are expected"),
        ("attend", [one(QUERIES, 0), one(KEYS, 0)], [], "attend takes queries and keys, and 1 parameters"),
        ("attend", [one(QUERIES, 0), one(QUERIES, 0)], [0], "without keys"),
        ("attend", [one(QUERIES, 0), one(KEYS, 1)], [-10], "of keys that it does not attend to"),
        ("attend", [one(QUERIES, 1), one(KEYS, 0)], [0], "over a distance that is not that of the blocks"),
        ("attend_by_state", [one(QUERIES, 1), one(KEYS, 1)], [0], "within a chunk, under a causal mask"),
        ("fold", [[]], [1], "without chunk states"),
        ("fold", [[(CHUNK_STATES, 0, 0), (CHUNK_STATES, 2, 0)]], [3], "of chunks with others in between"),
        ("fold", [one(CHUNK_STATES, 0)], [2], "of chunks with others in between"),
        ("fold", [[(CHUNK_STATES, 1, 0), (CHUNK_STATES, 0, 0)]], [2], "of chunks with others in between"),
        ("fold", [[(CHUNK_STATES, 1, 0), (CHUNK_STATES, 1, 0)]], [2], "of chunks with others in between"),
        ("fold", [one(CHUNK_STATES, 3)], [4], "to a chunk that has no such state"),
        ("fold", [one(CHUNK_STATES, 0)], [0], "to a chunk that has no such state"),
        ("fold", [one(CHUNK_STATES, 0)], [-1], "to a chunk that has no such state"),
        ("fold", [one(CHUNK_STATES, 5)], [2], "of chunks with others in between"),
        ("fold", [[(CHUNK_STATES, 4, 0), (CHUNK_STATES, 5, 0)]], [3], "of chunks with others in between"),
        ("combine", [one(CHUNK_STATES, 1), one(CHUNK_STATES, 0)], [], "not the halves of a segment"),
        ("combine", [one(CHUNK_STATES, 0), one(CHUNK_STATES, 2)], [], "not the halves of a segment"),
        ("combine", [one(CHUNK_STATES, 4), one(CHUNK_STATES, 5)], [], "not the halves of a segment"),
        ("combine", [one(CHUNK_STATES, 2), one(CHUNK_STATES, 3)], [], "not the halves of a segment"),
        ("combine", [one(CHUNK_STATES, 0), one(PREFIX_STATES, 1)], [], "without two chunk states"),
        ("combine", [one(CHUNK_STATES, 0), []], [], "without two chunk states"),
        ("combine", [[(CHUNK_STATES, 0, 0), (CHUNK_STATES, 1, 0)], one(CHUNK_STATES, 2)], [], "are expected"),
        ("combine", [one(CHUNK_STATES, 0), one(CHUNK_STATES, 1)], [4], "and 0 parameters"),
        ("advance", [[], one(CHUNK_STATES, 3)], [], "to a chunk that has no such state"),
        ("advance", [one(PREFIX_STATES, 1), one(CHUNK_STATES, 2)], [], "are expected"),
        ("apply_state", [one(QUERIES, 0), []], [], "of a chunk that has no such state"),
        ("apply_state", [one(QUERIES, 1), one(PREFIX_STATES, 2)], [], "are expected"),
    ],
)  # fmt: skip
def test_calls_that_the_layer_does_not_require_are_refused(
    kernel: str, operands: list[list[Block]], params: list[int], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        effects(task_of(PLAIN), kernel, operands, *params)


def test_gates_stay_with_their_chunk() -> None:
    operands = [one(QUERIES, 1), one(KEYS, 0), one(GATES, 1)]
    with pytest.raises(ScheduleError, match="over gates of other chunks"):
        effects(task_of(CHANNEL), "attend", operands, 10)


def test_chains_and_full_masks_exclude_each_other() -> None:
    task = task_of(replace(PLAIN, mask="full"))
    assert effects(task, "fold", [[(CHUNK_STATES, 0, 0), (CHUNK_STATES, 3, 0)]], 1) == [
        ((PREFIX_STATES, 1, 0), 0),
        ((PREFIX_STATES, 1, 0), 3),
    ]
    with pytest.raises(ScheduleError, match="advance with a full mask, expected a causal mask"):
        effects(task, "advance", [one(PREFIX_STATES, 1), one(CHUNK_STATES, 1)])
    with pytest.raises(
        ScheduleError, match="schedule 'lasp' passes states from chunk to chunk, expected a causal mask"
    ):
        linear_schedules("lasp", full_mesh(4), replace(PLAIN, mask="full"))


def test_blocks_are_those_of_their_fields() -> None:
    rows, states = 2 * 8 * 10, 4 * 2 * 8 * 8  # batch x head_dim x positions; float32 x batch x head_dim^2, per head
    totals = {"none": 0, "head": 4, "scalar": 4 * 2, "channel": 4 * 2 * 8}
    gates = {"scalar": 4 * 2 * 10, "channel": 4 * rows}
    for decay, total in totals.items():
        forward, backward = (task_of(replace(CHANNEL, decay=decay), backward=each, pieces=2) for each in (False, True))  # type: ignore[arg-type]
        for task, tensor, expected in (
            (forward, KEYS, 2 * 2 * 2 * rows),
            (forward, QUERIES, 2 * 4 * rows),
            (forward, RESULTS, 4 * 4 * rows),
            (forward, CHUNK_STATES, states + total),
            (forward, PREFIX_STATES, states),
            (backward, QUERIES, 2 * 2 * 4 * rows),
            (backward, KEY_GRADIENTS, 2 * 4 * 2 * rows),
            (backward, CHUNK_GRADIENTS, states + total),
            (backward, SUFFIX_GRADIENTS, states),
            *(
                [(forward, GATES, 2 * gates[decay]), (backward, GATE_GRADIENTS, 2 * gates[decay])]
                if decay in gates
                else []
            ),
        ):
            assert set(task.block_bytes[task.tensor == tensor].tolist()) == {expected}


def test_layers_that_are_no_linear_attention_are_refused() -> None:
    for changes, message in (
        ({"decay": "linear"}, "unknown decay 'linear', expected one of none, head, scalar, channel"),
        ({"kind": "quadratic"}, "unknown kind 'quadratic', expected one of softmax, linear"),
        ({"kind": "softmax"}, "decay 'channel' of softmax attention, expected linear attention"),
        ({"window": 3}, "window: 3, expected none for linear attention"),
        ({"mask": "full"}, "decay 'channel' with a full mask has no agreed meaning"),
    ):
        with pytest.raises(WorkloadError, match=message):
            replace(CHANNEL, **changes)  # type: ignore[arg-type]
    for layer, message in (
        (
            replace(CHANNEL, kind="softmax", decay="none"),
            "a layer of softmax attention, expected one of linear attention",
        ),
        (
            replace(PLAIN, mask="full", documents=(20, 20)),
            "with a full mask has one state, expected no packed documents",
        ),
    ):
        with pytest.raises(ScheduleError, match=message):
            task_of(layer)
    head = replace(CHANNEL, decay="head")
    for decays in ((0.0, 0.5), (1.5, 1.0), (0.5,)):
        with pytest.raises(ScheduleError, match="expected 2 numbers above 0 and up to 1, one per KV head"):
            linear_schedules("lasp-2", full_mesh(2), head, decays=decays)
    with pytest.raises(ScheduleError, match=r"decays \(0.5, 0.5\) of a layer with decay 'none', expected 'head'"):
        linear_schedules("lasp-2", full_mesh(2), PLAIN, decays=(0.5, 0.5))
    with pytest.raises(
        ScheduleError, match="layout 'striped' of 40 positions, expected spans of consecutive positions"
    ):
        LinearTask(PLAIN, striped(40, 2))
    with pytest.raises(ScheduleError, match="2 KV heads in 4 groups, expected groups of equal size"):
        task_of(PLAIN, pieces=4)
    with pytest.raises(ScheduleError, match="states in 2 pieces are already cut by heads"):
        task_of(replace(PLAIN, kv_heads=4), pieces=2).in_head_groups(2)
