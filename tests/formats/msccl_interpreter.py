"""Executes MSCCL XML as its engines do, written from the grammar alone; it shares no code with the exporter or reader.

Every connection holds `depth` messages. Memory has a number for each chunk: the sum over ranks of distinct powers, so a
missing, doubled or misplaced contribution changes it.
"""

from __future__ import annotations

import re
from collections import deque
from random import Random

FUSED = {
    "s": (0, 0, 1, 0), "r": (1, 0, 0, 1), "rcs": (1, 0, 1, 1), "rrs": (1, 1, 1, 0), "rrc": (1, 1, 0, 1),
    "rrcs": (1, 1, 1, 1), "cpy": (0, 0, 0, 1), "re": (0, 0, 0, 1), "nop": (0, 0, 0, 0),
}  # fmt: skip
"""Of each type: whether it receives, reduces with what came, sends, and stores."""

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
    while True:
        moved = False
        if seed is not None:
            random.shuffle(order)
        for rank, number in order:
            block = gpus[rank]["blocks"][number]
            while done[rank, number] < len(block["steps"]):
                step = block["steps"][done[rank, number]]
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
                if seed is not None and random.random() < 0.5:
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
        values = [a + b for a, b in zip(values, other[at : at + step["cnt"]], strict=True)]
    assert len(values) == step["cnt"]
    assert None not in values, "reads what nobody wrote"
    if stores:
        assert step["dstoff"] + step["cnt"] <= len(destination)
        destination[step["dstoff"] : step["dstoff"] + step["cnt"]] = values
    if leaving is not None:
        leaving.append(list(values))


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
