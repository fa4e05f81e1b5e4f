"""Pipelines: in which order a stage works on micro-batches, how long that takes, and how many are under way.

    orders = one_forward_one_backward(stages=4, chunks=1, microbatches=8)

One forward, one backward (1F1B): a stage starts with as many forward passes as there are stages behind it, then
alternates, so that few micro-batches are in memory at once (arXiv:2104.04473, figure 4). With several *chunks*, parts
of the model, per stage it takes ``stages`` micro-batches through each of its chunks in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tasp_lab.core.units import Number


class Work(NamedTuple):
    """A pass of a micro-batch through a chunk of the model; chunk c is at stage ``c % stages``."""

    chunk: int
    microbatch: int
    is_backward: bool


def one_forward_one_backward(stages: int, chunks: int, microbatches: int) -> list[list[Work]]:
    """The order of work of each stage, with so many chunks per stage.

    >>> ["".join("fb"[work.is_backward] for work in order) for order in one_forward_one_backward(3, 1, 4)]
    ['fffbfbbb', 'ffbfbfbb', 'fbfbfbfb']
    """
    return [order_of(stage, stages, chunks, microbatches) for stage in range(stages)]


def order_of(stage: int, stages: int, chunks: int, microbatches: int) -> list[Work]:
    """The order of work of one of so many stages."""

    def work(number: int, is_backward: bool) -> Work:
        # Rounds of `stages` micro-batches go through the chunks of a stage one after another, backward from the last.
        turn, within = divmod(number, stages * chunks)
        chunk, microbatch = divmod(within, stages)
        chunk = chunks - 1 - chunk if is_backward else chunk
        return Work(chunk * stages + stage, turn * stages + microbatch, is_backward)

    count = microbatches * chunks
    behind = stages - stage - 1
    ahead = min(count, behind if chunks == 1 else 2 * behind + (chunks - 1) * stages)
    found = [work(number, False) for number in range(ahead)]
    for number in range(count - ahead):
        found += [work(ahead + number, False), work(number, True)]
    return found + [work(number, True) for number in range(count - ahead, count)]


def makespan_s(orders: Sequence[Sequence[Work]], work_s: Callable[[Work], Number], send_s: Number) -> Number:
    """When the last stage ends its work, each in its order, if results take `send_s` to the stage that needs them.

    A forward pass needs the result of the chunk before, a backward pass that of the chunk behind, or, of the last
    chunk, its own forward pass. Sending does not hold up the stage that sends.
    """
    last = max(work.chunk for order in orders for work in order)
    ended: dict[tuple[int, int, bool], Number] = {}
    at: list[int] = [0] * len(orders)
    free: list[Number] = [0] * len(orders)
    moves = True
    while moves:
        moves = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                work = order[at[stage]]
                chunk, microbatch, is_backward = work
                begin, needed = free[stage], _needed(chunk, microbatch, is_backward, last)
                if needed is not None:
                    if needed not in ended:
                        break
                    begin = max(begin, ended[needed] + (send_s if needed[0] != chunk else 0))
                free[stage] = ended[work] = begin + work_s(work)
                at[stage] += 1
                moves = True
    assert all(done == len(order) for done, order in zip(at, orders, strict=True)), "every order can be followed"
    return max(free)


def _needed(chunk: int, microbatch: int, is_backward: bool, last: int) -> tuple[int, int, bool] | None:
    """The work that another one needs, as a plain tuple: equal to a `Work`, and made in a fraction of the time."""
    if not is_backward:
        return (chunk - 1, microbatch, False) if chunk else None
    return (chunk + 1, microbatch, True) if chunk < last else (chunk, microbatch, False)


def most_under_way(order: Sequence[Work], size: Callable[[int], int]) -> int:
    """The largest sum of sizes of the chunks that a stage has passed forward and not yet backward, over its work."""
    found = under_way = 0
    for work in order:
        under_way += -size(work.chunk) if work.is_backward else size(work.chunk)
        found = max(found, under_way)
    return found
