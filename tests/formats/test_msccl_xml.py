"""Laws of MSCCL XML: what is written runs to the right bytes, what is read is what was written, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import msccl_xml
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.conditions import collectives_of
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce
from tasp_lab.topology.builders import full_mesh
from tests.conftest import Command
from tests.formats.msccl_interpreter import DeadlockError, expected, parse, run
from tests.formats.worlds import SHARD_BYTES, schedules, written

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


@settings(max_examples=25, deadline=None)
@given(ranks=st.integers(2, 4), chunks=st.integers(1, 3), sums=st.booleans(), data=st.data())
def test_a_changed_step_is_refused_or_still_right(
    ranks: int, chunks: int, sums: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a step deleted or an offset changed, the reader refuses the file, or its results are right."""
    build = ring_all_reduce if sums else ring_all_gather
    lines = msccl_xml.write(build(full_mesh(ranks), 240, chunks=chunks)).splitlines()
    steps = [number for number, line in enumerate(lines) if "<step" in line and 'type="nop"' not in line]
    at = data.draw(st.sampled_from(steps))
    name, value = data.draw(st.sampled_from([("srcoff", 0), ("dstoff", 0), ("type", "nop"), ("srcoff", 1)]))
    head, _, tail = lines[at].partition(f'{name}="')
    lines[at] = f'{head}{name}="{value}"{tail[tail.index(chr(34)) + 1 :]}'.replace('""', '"')
    text = "\n".join(lines)
    path = tmp_path_factory.mktemp("changed") / "plan.xml"
    path.write_text(text)
    refusal = ""
    try:
        msccl_xml.read(path, 240)
    except ScheduleError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(str(path))
        assert "\n" not in refusal
        return
    memory, (start, _) = run(text, depth=64), parse(text)
    for rank in range(ranks):
        buffer, first, values = expected(start, rank)
        assert memory[rank][buffer][first : first + len(values)] == values


def test_the_interpreter_finds_a_deadlock() -> None:
    """Two ranks that receive before they send."""
    text = msccl_xml.write(ring_all_gather(full_mesh(2), 64))
    lines = text.splitlines()
    for first in (3, 9):
        lines[first], lines[first + 1] = (
            lines[first + 1].replace('s="1" type', 's="0" type'), lines[first].replace('s="0" type', 's="1" type'),
        )  # fmt: skip
    with pytest.raises(DeadlockError):
        run("\n".join(lines))


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
