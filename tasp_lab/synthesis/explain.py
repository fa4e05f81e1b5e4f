"""A found schedule in words: what travels where, by which route, in which order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasp_lab.schedules.attention.program import Plan, Program

MOST_STEPS = 8
"""Steps of a pass that are listed."""


def explained(program: Program) -> list[str]:
    """The decisions of a program, line by line."""
    if program.known is not None:
        return [f"this is the schedule {program.known.schedule}"]
    shape = "x".join(map(str, program.shape))
    if program.members > 1:
        between = "" if shape == "1" else f"; what follows is between the {shape} groups"
        first = [f"groups of {program.members} ranks share out the heads{between}"]
    elif len(program.shape) > 1:
        first = [f"ranks form a {shape} grid; +1+2 is one row and two columns on"]
    else:
        first = [f"ranks in a row of {shape}; +2 is two ranks on"]
    first[0] += f"; positions are {program.layout}"
    if program.keep:
        first.append("keys stay where they were used for the backward pass, which sends none")
    for passing, plan in (("forward", program.forward), ("backward", program.backward)):
        if plan is not None:
            sent = not (program.keep and passing == "backward")
            first += [f"{passing}: {line}" for line in _plan(plan, program.shape, passing == "backward", sent)]
    return first


def _plan(plan: Plan, shape: Sequence[int], backward: bool, sent: bool) -> list[str]:
    n, pieces = int(np.prod(shape)), len(plan.trees)
    by_rank = any(len(tree.via) > n for tree in plan.trees)
    keys = [offset for offset in range(1, n) if offset not in plan.queries]
    found = []
    if plan.heads > 1:
        found.append(f"in {plan.heads} groups of heads, each a step behind the one before")
    if n == 1:
        return found or ["all heads at once"]
    if plan.own:
        found.append(f"ranks compute with what they own after {plan.own} steps")
    if plan.buffers:
        found.append(f"what arrives has {plan.buffers} buffers")
    if keys:
        cut = f" in {pieces} pieces" if pieces > 1 else ""
        ways = _routes(plan, keys, shape, by_rank)
        if sent:
            found.append(f"keys travel{cut} to {_all(keys, n, shape)}, {ways}")
        if plan.home == "straight" and backward:
            found.append(f"gradients of keys go{'' if sent else cut} straight to their owners")
        elif backward and sent:
            found.append("gradients of keys go back the way the keys came, added up")
        elif backward:
            found.append(f"gradients of keys go home{cut}, added up, {'' if by_rank else 'against this way: '}{ways}")
    if plan.queries:
        what = "gradients" if backward else "results"
        found.append(f"queries travel from {_all(plan.queries, n, shape)}, and their {what} return straight")
    if plan.lanes == "order":
        found.append("transfers between nodes follow one another")
    return found + ([] if by_rank else _arrivals(plan, keys, shape))


def _routes(plan: Plan, keys: Sequence[int], shape: Sequence[int], by_rank: bool) -> str:
    if by_rank:
        n = int(np.prod(shape))
        via = np.array([tree.via if len(tree.via) > n else (0,) * (n * n) for tree in plan.trees]).reshape(-1, n, n)
        if (via == via[:, :1]).all():  # a rank has all keys of a piece from the same one
            rings = len(np.unique(via[:, 0], axis=0))
            return f"around {rings} rings" if rings > 1 else "around a ring"
        straight = int((via == np.arange(n)[:, None])[:, ~np.eye(n, dtype=bool)].sum())
        return f"by a tree of their own for each rank, {straight} of {n * (n - 1) * len(via)} straight"
    used = {(tree.via[each], each) for tree in plan.trees for each in keys}
    straight_to = {end for start, end in used if not start}
    if all(not start for start, _ in used):
        return "straight from their owners"
    if all(start == end - 1 for start, end in used):
        return "around a ring"
    relays: dict[int, list[int]] = {}
    for start, end in sorted(used):
        if start:
            relays.setdefault(start, []).append(end)
    lines = [f"from {offset_text(start, shape)} on to {_some(ends, shape)}" for start, ends in relays.items()]
    more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
    return f"straight to {_some(sorted(straight_to), shape)}, {', '.join(lines[:4])}{more}"


def _arrivals(plan: Plan, keys: Sequence[int], shape: Sequence[int]) -> list[str]:
    steps: dict[int, dict[int, list[int]]] = {}
    for piece, tree in enumerate(plan.trees):
        for each in keys:
            steps.setdefault(tree.arrival[each], {}).setdefault(each, []).append(piece)
    if len(steps) < 2:
        return []
    texts = []
    for step in sorted(steps)[:MOST_STEPS]:
        by_pieces: dict[tuple[int, ...], list[int]] = {}
        for offset, pieces in steps[step].items():
            by_pieces.setdefault(tuple(pieces), []).append(offset)
        texts.append(" and ".join(
            _all(ends, int(np.prod(shape)), shape)
            + (f" (piece {', '.join(str(each + 1) for each in pieces)})" if len(plan.trees) > 1 else "")
            for pieces, ends in by_pieces.items()
        ))  # fmt: skip
    more = f"; and {len(steps) - MOST_STEPS} more steps" if len(steps) > MOST_STEPS else ""
    return [f"in the order {'; '.join(texts)}{more}"]


def _all(ends: Sequence[int], n: int, shape: Sequence[int]) -> str:
    return "all ranks" if len(ends) == n - 1 else _some(ends, shape)


def _some(ends: Sequence[int], shape: Sequence[int], most: int = 6) -> str:
    texts = [offset_text(each, shape) for each in ends]
    return (
        ", ".join(texts) if len(texts) <= most else f"{', '.join(texts[: most - 1])} and {len(texts) - most + 1} more"
    )


def offset_text(offset: int, shape: Sequence[int]) -> str:
    """An offset on a grid.

    >>> offset_text(3, (4,)), offset_text(11, (2, 8))
    ('+3', '+1+3')
    """
    return "".join(f"+{each}" for each in np.unravel_index(offset, shape))
