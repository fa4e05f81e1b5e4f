"""Executes MSCCL XML as its engines do, written from the grammar alone; it shares no code with the exporter or reader.

Every connection holds `depth` messages. Memory has a number for each chunk: the sum over ranks of distinct powers, so a
missing, doubled or misplaced contribution changes it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from random import Random

FUSED = {
    "s": (0, 0, 1, 0), "r": (1, 0, 0, 1), "rcs": (1, 0, 1, 1), "rrs": (1, 1, 1, 0), "rrc": (1, 1, 0, 1),
    "rrcs": (1, 1, 1, 1), "cpy": (0, 0, 0, 1), "re": (0, 0, 0, 1), "nop": (0, 0, 0, 0),
}  # fmt: skip
"""Of each type: whether it receives, reduces with what came, sends, and stores."""

SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
"""NCCL_STEPS is 8, and a message takes half of them with Simple, else one."""

TAG = re.compile(r'<(/?)(\w+)((?: \w+="[^"]*")*)( ?/?)>')


class DeadlockError(Exception):
    """No thread block can go on."""


def parse(text: str) -> tuple[dict[str, str], dict[int, dict[int, dict]]]:
    """The attributes of the algorithm, and per GPU the thread blocks; one tag a line, as RCCL's parser wants them."""
    head: dict[str, str] = {}
    gpus: dict[int, dict[int, dict]] = {}
    for line in text.splitlines():
        match = TAG.fullmatch(line.strip())
        assert match is not None, line
        if match[1]:
            continue
        values = dict(re.findall(r'(\w+)="([^"]*)"', match[3]))
        assert len(values) <= 16
        if match[2] == "algo":
            head = values
        elif match[2] == "gpu":
            gpu = gpus[int(values["id"])] = {}
            gpu["sizes"] = {name: int(values[f"{name}_chunks"]) for name in "ios"}
            gpu["blocks"] = {}
        elif match[2] == "tb":
            block = {name: int(values[name]) for name in ("send", "recv", "chan")} | {"steps": []}
            gpu["blocks"][int(values["id"])] = block
        else:
            assert match[2] == "step"
            assert int(values["s"]) == len(block["steps"])
            block["steps"].append({k: v if k in ("type", "srcbuf", "dstbuf") else int(v) for k, v in values.items()})
    return head, gpus


def check_limits(head: dict[str, str], gpus: dict) -> None:
    """What parsers refuse."""
    for rank, gpu in gpus.items():
        blocks = gpu["blocks"]
        assert sorted(blocks) == list(range(len(blocks)))
        assert len(blocks) <= 64
        ends = [
            (side, block[side], block["chan"])
            for block in blocks.values()
            for side in ("send", "recv")
            if block[side] >= 0
        ]
        assert len(ends) == len(set(ends)), "a connection belongs to one thread block each way"
        assert all(block[side] != rank for block in blocks.values() for side in ("send", "recv"))
        assert all(block["chan"] < int(head["nchannels"]) for block in blocks.values())
        for block in blocks.values():
            assert len(block["steps"]) <= 64
            for step in block["steps"]:
                assert step["cnt"] < 72
                if step["depid"] >= 0:
                    other = blocks[step["depid"]]["steps"][step["deps"]]
                    assert other["hasdep"] == 1
                    assert blocks[step["depid"]] is not block


def run(text: str, depth: int = 1, seed: int | None = None) -> dict[int, dict[str, list[int]]]:
    """The memory of each rank at the end; `seed` draws the order in which thread blocks go on."""
    head, gpus = parse(text)
    check_limits(head, gpus)
    return execute(head, gpus, depth, seed)


def execute(head: dict[str, str], gpus: dict, depth: int, seed: int | None) -> dict[int, dict[str, list[int]]]:
    """As `run`. Odd seeds draw which thread block goes first whenever it can, even ones each turn anew."""
    n, total, kind = int(head["ngpus"]), int(head["nchunksperloop"]), head["coll"]
    shard = total // n
    in_place = head["inplace"] == "1"
    memory = {}
    for rank in range(n):
        inputs = shard if kind == "allgather" else total
        i = [start_value(kind, rank, number, total) for number in range(inputs)]
        if in_place and kind == "allgather":
            o = [None] * total
            o[rank * shard : (rank + 1) * shard] = i
            i = o
        else:
            o = i if in_place else [None] * (shard if kind == "reducescatter" else total)
        memory[rank] = {"i": i, "o": o, "s": [None] * gpus[rank]["sizes"]["s"]}
    fifos: dict[tuple[int, int, int], deque] = {}
    done = {(rank, number): 0 for rank in gpus for number in gpus[rank]["blocks"]}
    order = sorted(done)
    random = Random(seed)
    ranked = seed is not None and seed % 2 == 1
    if ranked:
        random.shuffle(order)
    while True:
        moved = False
        if seed is not None and not ranked:
            random.shuffle(order)
        for rank, number in order:
            gpu_blocks = gpus[rank]["blocks"]
            block = gpu_blocks[number]
            while done[rank, number] < len(block["steps"]):
                step = block["steps"][done[rank, number]]
                assert step["depid"] < 0 or step["deps"] in range(len(gpu_blocks[step["depid"]]["steps"]))
                if step["depid"] >= 0 and done[rank, step["depid"]] <= step["deps"]:
                    break
                receives, reduces, sends, stores = FUSED[step["type"]]
                arriving = fifos.setdefault((block["recv"], rank, block["chan"]), deque())
                leaving = fifos.setdefault((rank, block["send"], block["chan"]), deque())
                if (receives and not arriving) or (sends and len(leaving) >= depth):
                    break
                _execute(
                    step, memory[rank], arriving if receives else None, leaving if sends else None, reduces, stores
                )
                done[rank, number] += 1
                moved = True
                if seed is not None and not ranked and random.random() < 0.5:
                    break
            if ranked and moved:
                break
        if not moved:
            break
    stuck = [key for key in order if done[key] < len(gpus[key[0]]["blocks"][key[1]]["steps"])]
    if stuck:
        raise DeadlockError(stuck)
    assert not any(fifos.values())
    return memory


def _execute(
    step: dict, memory: dict, arriving: deque | None, leaving: deque | None, reduces: int, stores: int
) -> None:
    if step["type"] == "nop":
        return
    source = memory.get(step["srcbuf"], [])
    destination = memory[step["dstbuf"]]
    values = arriving.popleft() if arriving is not None else source[step["srcoff"] : step["srcoff"] + step["cnt"]]
    if reduces or step["type"] == "re":
        other = source if reduces else destination
        at = step["srcoff"] if reduces else step["dstoff"]
        others = other[at : at + step["cnt"]]
        assert len(values) == len(others), "moves other chunks than there are"
        assert None not in [*values, *others], "reads what nobody wrote"
        values = [a + b for a, b in zip(values, others, strict=True)]
    assert len(values) == step["cnt"], "moves other chunks than there are"
    assert None not in values, "reads what nobody wrote"
    if stores:
        assert step["dstoff"] + step["cnt"] <= len(destination)
        destination[step["dstoff"] : step["dstoff"] + step["cnt"]] = values
    if leaving is not None:
        leaving.append(list(values))


def faults(text: str, orders: int) -> Iterator[str]:
    """What goes wrong in each of some random orders that does: ranks that end wrongly, missing data, a deadlock.

    Connections hold as many messages as with the protocol, or any number.
    """
    head, gpus = parse(text)
    for seed in range(orders):
        try:
            memory = execute(head, gpus, SLOTS[head["proto"]] if seed & 2 else 10**6, seed)
        except (AssertionError, DeadlockError) as error:
            yield f"{type(error).__name__} {error}"
            continue
        for rank in gpus:
            buffer, first, values = expected(head, rank)
            if memory[rank][buffer][first : first + len(values)] != values:
                yield f"GPU {rank} ends with {memory[rank][buffer]}"
                break


Step = tuple[int, int, int]
"""A GPU, a thread block and the number of a step."""


def can_precede(text: str, first: Step, second: Step) -> bool:
    """Whether some order has one step before the other: with the second held back, the first can be reached."""
    _, gpus = parse(text)
    done: dict[tuple[int, int], int] = dict.fromkeys(
        ((rank, number) for rank in gpus for number in gpus[rank]["blocks"]), 0
    )
    messages: dict[tuple[int, int, int], int] = {}
    before = -1
    while before < sum(done.values()):
        before = sum(done.values())
        for rank, number in done:
            block = gpus[rank]["blocks"][number]
            while done[rank, number] < len(block["steps"]):
                step = block["steps"][done[rank, number]]
                receives, _, sends, _ = FUSED[step["type"]]
                arriving, leaving = (block["recv"], rank, block["chan"]), (rank, block["send"], block["chan"])
                if (
                    (rank, number, done[rank, number]) == second
                    or (step["depid"] >= 0 and done[rank, step["depid"]] <= step["deps"])
                    or (receives and not messages.get(arriving))
                ):
                    break
                messages[arriving] = messages.get(arriving, 0) - receives
                messages[leaving] = messages.get(leaving, 0) + sends
                done[rank, number] += 1
    return done[first[:2]] > first[2]


def start_value(kind: str, rank: int, number: int, total: int) -> int:
    """A contribution of a rank; sums of those of several ranks have one digit each."""
    return (number + 1) * 1000**rank if kind in ("allreduce", "reducescatter") else rank * total + number + 1


def expected(head: dict[str, str], rank: int) -> tuple[str, int, list[int]]:
    """The buffer, the first chunk and the values that a rank must have in the end."""
    n, total, kind = int(head["ngpus"]), int(head["nchunksperloop"]), head["coll"]
    shard = total // n
    if kind == "allgather":
        return "o", 0, [start_value(kind, owner, number, total) for owner in range(n) for number in range(shard)]
    if kind == "alltoall":
        return "o", 0, [start_value(kind, s, rank * shard + number, total) for s in range(n) for number in range(shard)]
    sums = [sum(start_value(kind, each, number, total) for each in range(n)) for number in range(total)]
    if kind == "allreduce":
        return "o", 0, sums
    first = rank * shard if head["inplace"] == "1" else 0
    return ("i" if head["inplace"] == "1" else "o"), first, sums[rank * shard : (rank + 1) * shard]
