"""Executes MSCCL++ plans from the grammar of execution_plan.cc; shares no code with the exporter.

Ranks' thread blocks go on in a drawn order; a put writes the memory of the peer at once, so that one that comes too
early destroys what is there. Channels count signals, each end of its pair on its own.

One execution proves all orders: of two operations on one chunk, one of which writes it, the one must have ended before
the other begins. What is ordered are operations of a thread block with a barrier (``nop``) between them, and what is
before a barrier before a signal or semaphore, with what is after a barrier after the wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random

from tests.formats.msccl_interpreter import DeadlockError, start_value

ThreadBlock = tuple[int, int]


class _Order:
    """Vector clocks: of each thread block how many of its phases, which barriers end, have ended."""

    def __init__(self) -> None:
        self.phase: dict[ThreadBlock, int] = defaultdict(int)
        self.clock: dict[ThreadBlock, dict[ThreadBlock, int]] = defaultdict(dict)
        self.waited: dict[ThreadBlock, list[dict[ThreadBlock, int]]] = defaultdict(list)
        self.posted: dict[tuple, deque[dict[ThreadBlock, int]]] = defaultdict(deque)
        self.writer: dict[tuple[int, int], tuple[ThreadBlock, int]] = {}
        self.readers: dict[tuple[int, int], list[tuple[ThreadBlock, int]]] = defaultdict(list)

    def barrier(self, block: ThreadBlock) -> None:
        for clock in self.waited.pop(block, []):
            self.clock[block] = {
                each: max(self.clock[block].get(each, 0), clock.get(each, 0)) for each in self.clock[block] | clock
            }
        self.phase[block] += 1

    def post(self, block: ThreadBlock, key: tuple, is_relaxed: bool = False) -> None:
        self.posted[key].append({} if is_relaxed else self.clock[block] | {block: self.phase[block]})

    def wait(self, block: ThreadBlock, key: tuple) -> None:
        self.waited[block].append(self.posted[key].popleft())

    def use(self, block: ThreadBlock, reads: list[tuple[list, dict]], target: tuple[list, dict]) -> None:
        read, written = (
            {(id(b), p["index"] + at) for b, p in each for at in range(p["size"])} for each in (reads, [target])
        )
        for place in read | written:
            earlier = [self.writer[place]] if place in self.writer else []
            for other, phase in earlier + (self.readers[place] if place in written else []):
                ended = self.phase[block] if other == block else self.clock[block].get(other, 0)
                assert ended > phase, f"thread block {block} uses {place} in no fixed order with {other}"
        for place in read:
            self.readers[place].append((block, self.phase[block]))
        for place in written:
            self.writer[place], self.readers[place] = (block, self.phase[block]), []


def run(plan: dict, seed: int) -> dict[int, dict[str, list[int]]]:
    """The memory of each rank at the end."""
    kind, gpus, random = plan["collective"], plan["gpus"], Random(seed)
    n = len(gpus)
    assert [gpu["id"] for gpu in gpus] == list(range(n))
    total = max(gpus[0]["input_chunks"], gpus[0]["output_chunks"])
    memory = {rank: _buffers(plan, rank, kind, total) for rank in range(n)}
    pair = _pairs(gpus)
    signals = {(rank, number): 0 for rank in range(n) for number in range(len(_connected(gpus[rank])))}
    semaphores = {(r, k): each["init_value"] for r, gpu in enumerate(gpus) for k, each in enumerate(gpu["semaphores"])}
    done = {(rank, number): 0 for rank, gpu in enumerate(gpus) for number in range(len(gpu["threadblocks"]))}
    for gpu in gpus:
        assert len(gpu["semaphores"]) <= 16
        for number, block in enumerate(gpu["threadblocks"]):
            assert block["id"] == number
            assert len(block["ops"]) <= 64
            assert all(len(each["channel_ids"]) <= 16 for each in block["channels"])
    ordered = _Order()
    moved = True
    while moved:
        moved = False
        order = list(done)
        random.shuffle(order)
        for rank, number in order:
            block, me = gpus[rank]["threadblocks"][number], (rank, number)
            while done[rank, number] < len(block["ops"]):
                op = block["ops"][done[rank, number]]
                name = op["name"]
                if "channel_ids" in op:
                    (local,) = op["channel_ids"]
                    channel = (rank, block["channels"][0]["channel_ids"][local])
                    if name in ("signal", "rlxsignal"):
                        signals[pair[channel]] += 1
                        ordered.post(me, pair[channel], is_relaxed=name == "rlxsignal")
                    else:
                        assert name in ("wait", "rlxwait")
                        if not signals[channel]:
                            break
                        signals[channel] -= 1
                        ordered.wait(me, channel)
                elif name == "sem_acquire":
                    key = (rank, op["semaphore_ids"][0])
                    if not semaphores[key]:
                        break
                    semaphores[key] -= 1
                    ordered.wait(me, ("semaphore", *key))
                elif name == "sem_release":
                    semaphores[rank, op["semaphore_ids"][0]] += 1
                    ordered.post(me, ("semaphore", rank, op["semaphore_ids"][0]))
                elif name == "put":
                    (source,), (target,) = op["src_buff"], op["dst_buff"]
                    remote = gpus[rank]["remote_buffers"][
                        block["remote_buffer_refs"][0]["remote_buffer_ids"][target["buffer_id"]]
                    ]
                    assert remote["rank"] != rank
                    there = memory[remote["rank"]][remote["type"]]
                    ordered.use(me, [(memory[rank][source["type"]], source)], (there, target))
                    _store(there, target, _load(memory[rank], source))
                elif name in ("re", "copy"):
                    values = [_load(memory[rank], each) for each in op["src_buff"]]
                    (target,) = op["dst_buff"]
                    reads = [(memory[rank][each["type"]], each) for each in op["src_buff"]]
                    ordered.use(me, reads, (memory[rank][target["type"]], target))
                    _store(memory[rank][target["type"]], target, [sum(each) for each in zip(*values, strict=True)])
                else:
                    assert name == "nop"
                    ordered.barrier(me)
                done[rank, number] += 1
                moved = True
                if random.random() < 0.4:
                    break
    if any(done[r, b] < len(gpus[r]["threadblocks"][b]["ops"]) for r, b in done):
        raise DeadlockError
    assert not any(signals.values())
    return memory


def _buffers(plan: dict, rank: int, kind: str, total: int) -> dict[str, list]:
    gpu = plan["gpus"][rank]
    i: list = [start_value(kind, rank, number, total) for number in range(gpu["input_chunks"])]
    o: list = [None] * gpu["output_chunks"]
    if plan["inplace"]:
        if kind == "allgather":
            o[rank * len(i) : (rank + 1) * len(i)] = i
        elif kind == "allreduce":
            o = i
    return {"i": i, "o": o, "s": [None] * gpu["scratch_chunks"]}


def _connected(gpu: dict) -> list[int]:
    (channels,) = gpu["channels"]
    assert channels["channel_type"] == "memory"
    return channels["connected_to"]


def _pairs(gpus: list[dict]) -> dict[tuple[int, int], tuple[int, int]]:
    """The other end of each channel: the k-th of a to b is that of the k-th of b to a."""
    ends: dict[tuple[int, int], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        for number, peer in enumerate(_connected(gpu)):
            ends.setdefault((rank, peer), []).append(number)
    return {
        (rank, number): (peer, other)
        for (rank, peer), numbers in ends.items()
        for number, other in zip(numbers, ends[peer, rank], strict=True)
    }


def _load(buffers: dict[str, list], place: dict) -> list[int]:
    values = buffers[place["type"]][place["index"] : place["index"] + place["size"]]
    assert len(values) == place["size"]
    assert None not in values
    return values


def _store(buffer: list, place: dict, values: list[int]) -> None:
    assert place["index"] + place["size"] <= len(buffer)
    buffer[place["index"] : place["index"] + place["size"]] = values
