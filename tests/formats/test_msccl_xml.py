"""Laws of MSCCL XML: what is written runs to the right bytes, what is read is what was written, the rest is refused."""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_lab
from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import msccl_xml
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.conditions import collectives_of
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.expressions import EXPRESSION_DEFAULTS
from tests.conftest import Command
from tests.formats.msccl_interpreter import can_precede, expected, parse, run
from tests.formats.worlds import SHARD_BYTES, schedules, written
from tests.support.plan_changes import FOLDER, PLANS, changes, fault, refusal

MIB = 2**20
WORLDS = schedules()


def test_most_collectives_fit_the_limits() -> None:
    fit = [name for name, schedule in WORLDS.items() if "send-recv" not in name and _fits(schedule)]
    assert len(fit) >= 50
    assert {name.split()[0] for name in fit} == {name.split()[0] for name in WORLDS}


def _fits(schedule: Schedule) -> bool:
    try:
        msccl_xml.write(schedule)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_written_runs_to_the_right_bytes(name: str) -> None:
    """With connections of one and of two messages, and thread blocks in any order."""
    text = written(msccl_xml.write, WORLDS[name])
    head, _ = parse(text)
    for depth, seed in ((1, None), (1, 0), (2, 1)):
        memory = run(text, depth, seed)
        for rank in range(int(head["ngpus"])):
            buffer, first, values = expected(head, rank)
            assert memory[rank][buffer][first : first + len(values)] == values


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_read_is_what_was_written(name: str, tmp_path: Path) -> None:
    """The bytes of every pair of ranks and the collective are the schedule's; a second time nothing changes."""
    schedule = WORLDS[name]
    text = written(msccl_xml.write, schedule)
    path = tmp_path / "plan.xml"
    path.write_text(text)
    once = msccl_xml.read(path, SHARD_BYTES)
    assert collectives_of(once) == collectives_of(schedule)
    assert len(once.steps) <= len(schedule.steps)
    assert _bytes(once) == _bytes(schedule)
    path.write_text(msccl_xml.write(once))
    assert msccl_xml.read(path, SHARD_BYTES).digest == once.digest


def _bytes(schedule: Schedule) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for step in schedule.steps:
        for source, destination, _, block in step.rows():
            found[source, destination] = found.get((source, destination), 0) + int(schedule.block_bytes[block])
    return found


@pytest.mark.parametrize("name", [name for name in PLANS if name != "missing_dependency_3"])
def test_plans_of_others_are_read(name: str, tmp_path: Path) -> None:
    assert refusal(PLANS[name]) == fault(PLANS[name]) == ""


@pytest.mark.parametrize(("name", "ranks", "size_bytes"), [("exchange_2", 2, 2 * MIB), ("one_pass_4", 4, 4 * MIB)])
def test_ranks_that_exchange_their_sums_do_so_in_one_step(name: str, ranks: int, size_bytes: int) -> None:
    """All of an AllReduce of 1 MiB per rank crosses every link at once, each way."""
    (prediction,) = tasp_lab.predict(f"full-mesh:{ranks}", [str(FOLDER / f"{name}.xml")], MIB, samples=0)
    link = EXPRESSION_DEFAULTS
    assert prediction.time_s == pytest.approx(
        link.link_latency_s + size_bytes / link.link_bandwidth_bytes_per_s, rel=1e-12
    )


@pytest.mark.parametrize(("name", "count"), [("chain_4", 8), ("one_pass_4", 12), ("two_pass_3", 12)])
def test_a_dependency_is_redundant_or_missed(name: str, count: int) -> None:
    """A plan without one of its dependencies is refused if some order of its steps has a wrong result.

    Then each of the two steps that are named can be before the other one, but not in the whole plan.
    """
    dropped = [text for kind, text in changes(PLANS[name]) if kind.endswith("no dependency")]
    for text in dropped:
        message = refusal(text)
        assert bool(message) == bool(fault(text, 60))
        if message:
            first, second = (
                tuple(map(int, each)) for each in re.findall(r"GPU (\d+), thread block (\d+), step (\d+)", message)
            )
            assert can_precede(text, first, second)
            assert can_precede(text, second, first)
            assert not (can_precede(PLANS[name], first, second) and can_precede(PLANS[name], second, first))
    assert len(dropped) == count


def test_a_missing_dependency_is_refused_with_the_steps_that_race() -> None:
    text = PLANS["missing_dependency_3"]
    message = "GPU 2, thread block 0, step 0 writes o1 and GPU 2, thread block 1, step 1 reads o1 in no fixed order"
    assert message in refusal(text)
    assert fault(text) == "AssertionError reads what nobody wrote"
    head, send, tail = text.rpartition('srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1"')
    repaired = head + send.replace('depid="-1" deps="-1"', 'depid="0" deps="0"') + tail
    assert refusal(repaired) == fault(repaired) == ""


CHANGED = [
    PLANS["two_pass_3"],
    PLANS["chain_4"],
    *(msccl_xml.write(ring_all_reduce(full_mesh(n), 240, chunks=chunks)) for n, chunks in ((2, 2), (3, 1), (4, 1))),
    *(msccl_xml.write(WORLDS[f"full-mesh:4 {name}"]) for name in ("direct", "all-to-all", "library-switch-all-reduce")),
]


@settings(max_examples=150, deadline=None)
@given(text=st.sampled_from(CHANGED), data=st.data())
def test_a_changed_plan_is_refused_or_still_right(text: str, data: st.DataObject) -> None:
    _, changed = data.draw(st.sampled_from(list(changes(text))))
    message = refusal(changed)
    assert "\n" not in message
    assert message or not fault(changed, 40)


@st.composite
def exchanges(draw: st.DrawFn) -> Schedule:
    """AllReduces in which all ranks that differ in one digit exchange their sums, one digit after the other."""
    sizes = draw(st.sampled_from([(2,), (3,), (4,), (5,), (6,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]))
    n, blocks = math.prod(sizes), draw(st.integers(1, 3))
    rows: dict[int, list[tuple[int, int, int, int, bool]]] = defaultdict(list)
    for block in range(blocks):
        step, lane = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        for digit in draw(st.permutations(range(len(sizes)))):
            stride = math.prod(sizes[:digit])
            for rank, other in itertools.permutations(range(n), 2):
                if (
                    abs(rank - other) % stride == 0
                    and rank // stride // sizes[digit] == other // stride // sizes[digit]
                ):
                    rows[step].append((rank, other, lane, block, False))
            step += 1 + draw(st.integers(0, 1))
    everything = np.ones((n, blocks), dtype=bool)
    return Schedule(
        name="exchange",
        world_size=n,
        lanes=3,
        blocks=Blocks.of_sums(np.full(blocks, 240 * n), n),
        initial=everything,
        final=everything.copy(),
        steps=[Step.of(draw(st.permutations(rows[step]))) for step in range(max(rows) + 1)],
        initial_part=np.tile(np.arange(n)[:, None], blocks),
    )


@settings(max_examples=50, deadline=None)
@given(exchanges())
def test_exchanges_of_sums_are_read_as_they_were_written(schedule: Schedule) -> None:
    """Even where a block of sums is larger than a shard. Pauses are left out."""
    text = msccl_xml.write(schedule)
    assert fault(text, 4) == ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.xml"
        path.write_text(text)
        once = msccl_xml.read(path, 240 * len(schedule.blocks))
    assert _bytes(once) == _bytes(schedule)
    assert len(once.steps) <= sum(len(step.source) > 0 for step in schedule.steps)


def plan(coll: str, chunks: int, *gpus: str, proto: str = "Simple", inplace: int = 1, outofplace: int = 0) -> str:
    """A plan of thread blocks, as peer to send to, peer to receive from, then steps: type, source, chunks and so on.

    `plan("allreduce", 2, "1 1: s i0 i0 2; rrc i0 i0 2", ...)`; a wait is added as thread block and step.
    """
    lines = [
        f'<algo name="x" proto="{proto}" nchannels="1" nchunksperloop="{chunks}" ngpus="{len(gpus)}" coll="{coll}" '
        f'inplace="{inplace}" outofplace="{outofplace}" minBytes="0" maxBytes="0">'
    ]
    for rank, gpu in enumerate(gpus):
        lines.append(f'<gpu id="{rank}" i_chunks="{chunks}" o_chunks="{chunks}" s_chunks="{chunks}">')
        for number, block in enumerate(gpu.split("|")):
            peers, steps = block.split(":")
            send, receive = peers.split()
            lines.append(f'<tb id="{number}" send="{send}" recv="{receive}" chan="0">')
            for index, step in enumerate(steps.split(";")):
                kind, source, destination, count, *waits = step.split()
                depid, deps = waits or (-1, -1)
                lines.append(
                    f'<step s="{index}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" '
                    f'dstbuf="{destination[0]}" dstoff="{destination[1:]}" cnt="{count}" depid="{depid}" deps="{deps}" '
                    'hasdep="1"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>", ""])


def both(program: str) -> list[str]:
    """The same program on two ranks: OTHER is the other one, OWN and PEER are its chunk and that of the other one."""
    return [program.replace("OTHER", str(1 - r)).replace("OWN", str(r)).replace("PEER", str(1 - r)) for r in (0, 1)]


RIGHT = {
    "receives apart from sends, out of place": plan(
        "allreduce", 2, *both("-1 OTHER: rrc i0 o0 2 | OTHER -1: s i0 i0 2"), inplace=0, outofplace=1
    ),
    "in place, receives after sends": plan("allreduce", 2, *both("-1 OTHER: rrc i0 i0 2 1 0 | OTHER -1: s i0 i0 2")),
    "either way": plan("allreduce", 2, *both("OTHER OTHER: s i0 i0 2; rrc i0 o0 2"), outofplace=1),
    "halves": plan(
        "allreduce", 2, *both("OTHER OTHER: s iPEER i0 1; rrc iOWN iOWN 1; s iOWN iOWN 1; r iPEER iPEER 1")
    ),
    "fused": plan("allreduce", 2, *both("OTHER OTHER: s iPEER i0 1; rrcs iOWN iOWN 1; r iPEER iPEER 1")),
    "its own part after the sum is made": plan(
        "allreduce", 2, "-1 1: rrc i0 o0 2 | 1 -1: s i0 i0 2 0 0", "-1 0: rrc i0 o0 2 | 0 -1: s i0 i0 2",
        inplace=0, outofplace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_plan_that_is_right_in_every_order_is_read(name: str) -> None:
    assert refusal(RIGHT[name]) == fault(RIGHT[name]) == ""


SENDS = "s i{0} o0 1; s i{1} o0 1; s i{2} o0 1; r i0 o{0} 1; r i0 o{1} 1; r i0 o{2} 1; cpy i{3} o{3} 3"
THREE = [f"{1 - r} {1 - r}: {SENDS.format(*range(3 - 3 * r, 6 - 3 * r), 3 * r)}" for r in (0, 1)]
ROOT = "-1 1: rrc i0 i0 1 {0} | -1 2: rrc i0 i0 1 " + "".join(
    f"| {peer} -1: nop i0 i0 0 0 0; s i0 i0 1 1 0" for peer in (1, 2)
)
LEAF = "0 0: s i0 i0 1; r i0 i0 1"

WRONG_IN_SOME_ORDER = {
    "in place, a receive beside its send": (
        plan("allreduce", 2, *both("-1 OTHER: rrc i0 i0 2 | OTHER -1: s i0 i0 2")),
        "GPU 1, thread block 0, step 0 writes i0 and GPU 1, thread block 1, step 0 reads i0 in no fixed order",
    ),
    "right out of place only": (
        plan("allreduce", 2, *both("-1 OTHER: rrc i0 o0 2 | OTHER -1: s i0 i0 2"), outofplace=1),
        "GPU 1, thread block 0, step 0 writes o0 and GPU 1, thread block 1, step 0 reads i0 in no fixed order",
    ),
    "two additions at once": (
        plan("allreduce", 1, ROOT.format(""), LEAF, LEAF),
        "GPU 0, thread block 0, step 0 writes i0 and GPU 0, thread block 1, step 0 reads i0 in no fixed order",
    ),
    "two names of one chunk": (
        plan("allgather", 2, *both("-1 OTHER: r i0 oPEER 1 | OTHER -1: s i0 o0 1; cpy oPEER oPEER 1")),
        "GPU 1, thread block 0, step 0 writes o0 and GPU 1, thread block 1, step 1 reads o0 in no fixed order",
    ),
    "more messages than a connection holds": (
        plan("alltoall", 6, *THREE, inplace=0, outofplace=1),
        "GPU 0, thread block 0, step 2 waits for ever for room for more than 2 messages to GPU 1 on channel 0",
    ),
    "a copy over what it reads": (
        plan("allgather", 4, *both("OTHER OTHER: s i0 o0 2; r i0 o0 2; cpy o0 o1 2")),
        "step 2 writes some of the 2 chunks from o0 on that it reads",
    ),
}


@pytest.mark.parametrize("name", WRONG_IN_SOME_ORDER)
def test_a_plan_that_is_wrong_in_some_order_is_refused(name: str) -> None:
    text, words = WRONG_IN_SOME_ORDER[name]
    assert words in refusal(text)


def test_connections_hold_as_many_messages_as_their_protocol_has_slots() -> None:
    for proto, is_right in (("Simple", False), ("LL", True), ("LL128", True)):
        text = plan("alltoall", 6, *THREE, proto=proto, inplace=0, outofplace=1)
        assert [refusal(text) == "", fault(text) == ""] == [is_right, is_right]


def test_an_order_of_additions_makes_them_right() -> None:
    """One of two additions waits for the other; steps of a chain of waits follow each other."""
    text = plan("allreduce", 1, ROOT.format("1 0"), LEAF, LEAF)
    assert refusal(text) == fault(text) == ""


def test_what_steps_of_a_schedule_cannot_do_is_refused_with_the_reason() -> None:
    """Ranks pass on parts of others around a ring, and add them beside their own at the end."""
    program = "{1} {2}: s i0 s0 3; r i0 s0 3; s s0 s0 3; r i0 o0 3; re s0 o0 3; re i0 o0 3"
    text = plan(
        "allreduce", 3, *(program.format(0, (r + 1) % 3, (r + 2) % 3) for r in range(3)), inplace=0, outofplace=1
    )
    assert fault(text) == ""
    assert "as a GPU has one copy of a chunk, which what comes joins at once" in refusal(text)


GOOD = msccl_xml.write(ring_all_gather(full_mesh(2), 64))

WRONG = {
    "no XML": ("<algo", "no XML"),
    "another document": ("<topology/>", "the element is <topology>, expected <algo>"),
    "entities": ('<!DOCTYPE a [<!ENTITY b "c">]>' + GOOD, "declares a document type or entities"),
    "too long": (GOOD + " " * msccl_xml.MAX_FILE_BYTES, "bytes, expected at most 8,388,608"),
    "a foreign collective": (GOOD.replace('coll="allgather"', 'coll="broadcast"'), "unknown collective 'broadcast'"),
    "a misspelt collective": (GOOD.replace('coll="allgather"', 'coll="algather"'), "did you mean 'allgather'?"),
    "no collective": (GOOD.replace(' coll="allgather"', ""), "unknown collective ''"),
    "a missing GPU": (GOOD.replace('<gpu id="1"', '<gpu id="0"'), "GPU 1 is missing, expected 2 GPUs"),
    "a GPU too many": (GOOD.replace('ngpus="2"', 'ngpus="1"'), "id is '1', expected a whole number from 0 to 0"),
    "a missing step": (GOOD.replace(' s="1" type="r"', ' s="2" type="r"', 1), "thread block 0, step 1 is missing"),
    "a missing message": (GOOD.replace('type="s"', 'type="nop"', 1), "GPU 1, thread block 0, step 1 waits for ever"),
    "a missing receive": (GOOD.replace('type="r"', 'type="nop"', 1), "are never received"),
    "an unknown type": (GOOD.replace('type="s"', 'type="sr"', 1), "unknown type 'sr'"),
    "a missing dependency": (GOOD.replace('depid="-1"', 'depid="7"', 1), "waits for thread block 7, step -1, which is"),
    "a peer that is no rank": (GOOD.replace('send="1"', 'send="9"'), "send is '9', expected a whole number"),
    "itself": (GOOD.replace('send="1"', 'send="0"'), "GPU 0, thread block 0: send is 0, its own GPU"),
    "a wrong chunk": (GOOD.replace('dstoff="1"', 'dstoff="0"'), "GPU 0 ends with"),
    "a step that is not signalled": (
        PLANS["two_pass_3"].replace('hasdep="1"', 'hasdep="0"', 1),
        "GPU 0, thread block 2, step 0 waits for thread block 0, step 1, which has no hasdep",
    ),
    "one connection of two thread blocks": (
        plan("allgather", 2, *both("OTHER -1: s iOWN i0 1 | OTHER -1: s iOWN i0 1"), inplace=0),
        "GPU 0, thread block 1: another one has the connection with GPU 1 on channel 0",
    ),
    "chunks beyond the scratch buffer": (
        PLANS["two_pass_3"].replace('s_chunks="4"', 's_chunks="3"', 1),
        "GPU 0, thread block 1, step 1: no s3, expected chunks of the 3 of buffer s",
    ),
    "chunks beyond the output": (GOOD.replace('dstoff="1"', 'dstoff="2"'), "no o2, expected chunks of the 2 of"),
    "messages of other sizes": (
        plan("allreduce", 2, *both("OTHER OTHER: s i0 i0 2; r i0 s0 1; re s0 i0 1")),
        "receives 1 chunks, sent are 2",
    ),
    "a misspelt protocol": (GOOD.replace("Simple", "simple"), "unknown protocol 'simple', did you mean 'Simple'?"),
    "text": (GOOD.replace('cnt="1"', 'cnt="many"', 1), "cnt is 'many', expected a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, words = WRONG[case]
    path = tmp_path / "plan.xml"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        msccl_xml.read(path, 64)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_cycle_of_waits_is_refused(tmp_path: Path) -> None:
    """A thread block waits for a step of its own that comes later."""
    path = tmp_path / "plan.xml"
    path.write_text(GOOD.replace('depid="-1" deps="-1"', 'depid="0" deps="1"', 1))
    with pytest.raises(ScheduleError, match="GPU 0, thread block 0, step 0 waits for ever for thread block 0, step 1"):
        msccl_xml.read(path, 64)


def test_more_than_the_parsers_take_is_refused() -> None:
    with pytest.raises(ScheduleError, match="thread block 0 has 75 steps, expected at most 64"):
        msccl_xml.write(ring_all_reduce(full_mesh(16), 64))
    with pytest.raises(ScheduleError, match="have no equal chunks, expected at most 32767"):
        msccl_xml.write(ring_all_gather(full_mesh(4), 65537, chunks=2))


def test_fused_steps_are_read(tmp_path: Path) -> None:
    """An AllReduce of two ranks whose second half is one fused step: receive, add, store and send on."""
    both = 'srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"'
    text = '<algo name="x" proto="LL" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" inplace="1">\n'
    for rank, types in enumerate((("s", "r"), ("rrcs",))):
        text += f'<gpu id="{rank}" i_chunks="2" o_chunks="0" s_chunks="0">\n'
        text += f'<tb id="0" send="{1 - rank}" recv="{1 - rank}" chan="0">\n'
        text += "".join(f'<step s="{number}" type="{kind}" {both}/>\n' for number, kind in enumerate(types))
        text += "</tb>\n</gpu>\n"
    path = tmp_path / "plan.xml"
    path.write_text(text + "</algo>\n")
    schedule = msccl_xml.read(path, 32)
    assert collectives_of(schedule) == {"AllReduce": 32}
    assert [str(step) for step in schedule.steps] == [
        "0->1 lane 0 block 0 given\n0->1 lane 0 block 1 given", "1->0 lane 0 block 0\n1->0 lane 0 block 1",
    ]  # fmt: skip


def test_a_file_is_a_schedule_by_its_name(command: Command) -> None:
    """What `export` writes, `predict` takes: the same bytes around the same rings, in the same time."""
    written = command(
        "export", "full-mesh:4", "--schedule", "ring-all-reduce", "--format", "msccl-xml", "--output", "p.xml"
    )
    assert written.returncode == 0, written.stderr
    line = "predict full-mesh:4 --schedule ring-all-reduce --schedule p.xml --shard-bytes 1MiB --samples 0 --json"
    done = command(*line.split())
    assert done.returncode == 0, done.stderr
    own, foreign = json.loads(done.stdout)["predictions"]
    assert foreign["time_s"] == pytest.approx(own["time_s"], rel=1e-9)


def test_a_file_is_for_collectives_only(command: Command) -> None:
    (command.folder / "p.xml").write_text(GOOD)
    told = command.refused("compare", "full-mesh:2", "--seq", "4Ki", "--heads", "8", "--schedule", "p.xml")
    assert "schedule 'p.xml' is an AllGather, expected one for softmax attention" in told


def test_a_plan_that_races_ends_the_command(command: Command) -> None:
    (command.folder / "p.xml").write_text(PLANS["missing_dependency_3"])
    told = command.refused("predict", "full-mesh:3", "--schedule", "p.xml", "--shard-bytes", "1MiB")
    assert "p.xml: GPU 2, thread block 0, step 0 writes o1 and GPU 2, thread block 1, step 1 reads o1" in told
