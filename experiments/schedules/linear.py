"""Linear attention in a file of its own; ``--schedule experiments/schedules/linear.py:tree-scan``."""

from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.linear.task import chunk_layout
from tasp_lab.schedules.registry import schedule
from tasp_lab.schedules.writer import LinearWriter
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@schedule("tree-scan", "linear", layout=chunk_layout, moves_states=True)
def tree_scan(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions = DEFAULT_OPTIONS,
    decays: tuple[float, ...] = (),
) -> tuple[Schedule, ...]:
    """Recursive doubling of states (Hillis and Steele, 1986): after round r a rank has that of its last 2**r chunks."""

    def one_pass(backward: bool) -> Schedule:
        writer = LinearWriter(name, topology, workload, decays, backward=backward)
        begin, chunks = [*writer.begin, writer.chunks], range(writer.chunks)

        def first(chunk: int, width: int) -> int:
            return max(chunk + 1 - width, begin[chunk + 1])  # of the last `width` chunks, those that the next one needs

        for call in (writer.make_state, writer.attend):
            with writer.step():
                for chunk in chunks:
                    call(chunk)
        for width in [2**level for level in range((writer.chunks - 1).bit_length())]:
            arrivals = [(chunk - width, chunk) for chunk in chunks[width:] if begin[chunk] <= chunk - width]
            with writer.step():
                for before, chunk in arrivals:
                    writer.pass_on(first(before, width), before, to=chunk)
            with writer.step():
                for before, chunk in arrivals:
                    start, ahead = first(before, width), chunk + 2 * width
                    if ahead in chunks and begin[ahead] <= chunk and first(chunk, 2 * width) < first(chunk, width):
                        writer.combine(start, before, chunk, at=chunk)
                    if width > 1:
                        writer.combine(start, before, chunk - 1, at=chunk)
        for call in (writer.fold, writer.apply):
            with writer.step():
                for chunk in chunks:
                    call(chunk)
        return writer.schedule()

    return options.build(one_pass)
