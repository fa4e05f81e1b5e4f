"""What each failure costs: the time of a layer without a part of its machine, or with a slow one, over that with all.

    failures("h100-4x8", Workload(131072, kv_heads=8)).records()[0]["lost"]     # what to replace first

There are two times of each failure. *Unchanged*, the schedule that `compare` recommends for the whole machine goes on
with its options on what is left. The *best* schedule then is the fastest of those that `compare` would compare there.

Parts of one kind are *alike* if the machine is the same around them (`tasp_lab.topology.alike`). A schedule may need
some of them more than others, as a single ring needs 8 of the 32 NICs of four nodes; the dearest stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from sim.simulate import Engine
from tasp_lab.core.choices import Preference
from tasp_lab.core.errors import QuantityError, ScheduleError, TaspLabError
from tasp_lab.core.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Formats, Row, Table
from tasp_lab.core.tables import Part as Shown
from tasp_lab.core.units import format_time
from tasp_lab.core.workers import deal
from tasp_lab.prediction import captions
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.compare import Ranking, compare, is_too_large, outcome_of, shipped_names
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import LayerLike, MachineLike, Schedules, as_schedules, check_call
from tasp_lab.prediction.question import SETTINGS, PreparedMachine, Question, prepare, question_of, with_machine
from tasp_lab.prediction.rank import NEAR, Bar
from tasp_lab.schedules.build import AnySchedule
from tasp_lab.schedules.registry import uses_rings
from tasp_lab.topology.alike import alike
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.missing import nics_of

COSTS = 0.005
"""A schedule that takes longer by at most this share costs nothing."""

MOST = 32
"""Up to so many parts that are alike are all simulated; of more, as many stand for the others (`_classes`)."""


class Part(NamedTuple):
    """A part of a machine: its kind and name, what a question has without it or with half of it, and its place."""

    kind: str
    name: str
    without: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    links: tuple[int, ...] = ()


def parts_of(topology: Topology) -> Iterator[Part]:
    """The parts of a topology that may fail, then those that may be slow: of a link both ways together.

    The only link of a GPU fails with it. Raises `TopologyError` for a mesh with more links than can be listed.

    >>> from tasp_lab.topology.builders import nodes
    >>> [part.name for part in parts_of(nodes(2, 2)) if part.kind in ("NIC", "link", "slow link")]
    ['nic.0', 'nic.1', 'nic.2', 'nic.3', 'link.0-1', 'link.2-3', 'link.0-1', 'link.2-3']
    """
    found, kinds, pairs = list[Part](), topology.switch_kinds, dict[frozenset[int | str], list[int]]()
    for gpu in range(topology.world_size):
        found.append(Part("GPU", f"gpu.{gpu}", (f"gpu.{gpu}",), (f"rank.{gpu}.compute=x0.5",), (gpu,)))
    for number, nic in enumerate(nics_of(topology)):
        slow = (f"nic.{number}.bandwidth=x0.5",)
        links = tuple(link for own in nic.links.values() for link in own)
        found.append(Part("NIC", f"nic.{number}", (f"nic.{number}",), slow, tuple(nic.links), links))
    for index, link in enumerate(topology.listed_links()):
        pairs.setdefault(frozenset((link.source, link.destination)), []).append(index)
    of_nics, degrees = {link for part in found for link in part.links}, Counter(end for ends in pairs for end in ends)
    for ends, both in ((ends, both) for ends, both in pairs.items() if of_nics.isdisjoint(both)):
        name = "link." + topology.links[both[0]].name.replace("->", "-" if len(both) == 2 else ">")
        kind = "port" if any(kinds.get(str(end), "network") != "network" for end in ends) else "link"
        is_only = any(isinstance(end, int) and degrees[end] == 1 for end in ends)
        found.append(Part(kind, name, () if is_only else (name,), (f"{name}=x0.5",), (), tuple(both)))
    yield from (part._replace(overrides=()) for part in found if part.without)
    count = max(topology.node_of_rank) + 1
    for node in range(count) if 1 < count < topology.world_size else ():
        ranks = tuple(rank for rank, of_rank in enumerate(topology.node_of_rank) if of_rank == node)
        yield Part("node", f"node {node}", tuple(f"gpu.{rank}" for rank in ranks), (), ranks)
    yield from (part._replace(kind=f"slow {part.kind}", without=()) for part in found if part.overrides)


def failures(
    machine: MachineLike,
    work: LayerLike,
    schedules: Schedules | None = None,
    *,
    engine: Engine = "auto",
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
    prefer: Preference = "memory",
    jobs: int = 1,
    **settings: Any,
) -> View:
    """What each part of a machine costs where it is lost or slow, the dearest first; of parts that are alike one.

    Arguments are those of `tasp_lab.prediction.compare.compare`, and rows have the fields of ``--failures --json``. As
    long as no rank is missing, a schedule that takes 2 % longer on the whole machine than another one without a part
    is not simulated there.

    Raises `ScheduleError` if no schedule applies, `QuantityError` for a machine from which a part is missing already.

    >>> from tasp_lab.workload.layer import Workload
    >>> found = failures("full-mesh:4", Workload(4096, heads=4), ["ulysses", "zigzag-ring-attention"])
    >>> [(row["lost"], row["best"]) for row in found.rows][0]
    ('1 of 4 GPUs', 'ulysses')
    """
    check_call(failures, locals(), SETTINGS)
    count = count or count_lines(progress)
    asked = replace(question_of(machine, work, settings, engine=engine), sampling=None)
    whole = prepare(asked).machine
    if asked.without or whole.topology.labels:
        raise QuantityError(f"failures: {whole.topology.name}, expected a whole machine")
    given = None if schedules is None else as_schedules(schedules)
    ranking = compare(machine, work, given, engine=engine, screen=True, prefer=prefer, jobs=jobs, progress=progress,
                      count=count, **settings)  # fmt: skip
    if ranking.recommendation is None:
        raise ScheduleError(f"failures: no schedule applies: {ranking.candidates[0].reason}")
    base, given = ranking.recommendation.answer, given if ranking.choice is None else ranking.choice.names
    asked = with_machine(asked, whole)
    classes, of_kind = _classes(base), Counter(part.kind for part in parts_of(base.on.topology))

    def each_of(parts: Sequence[Part], function: Callable[[Part], tuple[Any, float]]) -> list[tuple[Any, float]]:
        texts = [f"{'without' if part.without else 'slow'} {part.name}" for part in parts]
        found = deal(function, parts, jobs, (), lambda number: count(number, len(parts), texts[number]))
        count(len(parts), len(parts), "")
        return found

    some = [part for parts, _ in classes for part in parts]
    unchanged = dict(zip(some, each_of(some, lambda part: _unchanged(part, asked, base)), strict=True))
    dearest = [max(parts, key=lambda part: unchanged[part][1]) for parts, _ in classes]
    bests = each_of(dearest, lambda part: _best(part, unchanged[part][1], asked, ranking, given))
    rows, base_s = list[dict[str, Any]](), float(base.time_s)
    for part, (parts, alike_parts), (best, best_s) in zip(dearest, classes, bests, strict=True):
        (reason, time_s), of, kind = unchanged[part], of_kind[part.kind], part.kind.removeprefix("slow ")
        which = f"{of}" if alike_parts == of else f"{alike_parts} alike of {of}"
        rows.append({
            "lost": f"1 of {which} {kind}{'s' * (of > 1)}{', at half speed' * (kind != part.kind)}",
            "kind": part.kind, "part": part.name, "without": [*part.without], "overrides": [*part.overrides],
            "alike": alike_parts, "of": of, "simulated": len(parts), "time_s": time_s, "factor": time_s / base_s,
            "least_factor": min(unchanged[each][1] for each in parts) / base_s, "reason": reason,
            "best": best, "best_time_s": best_s, "best_factor": best_s / base_s,
        })  # fmt: skip
    # a schedule that does not run has to be replaced by the best one
    rows.sort(key=lambda row: (-row["best_factor" if row["reason"] else "factor"], -row["best_factor"]))
    rows = [{name: None if value == inf else value for name, value in row.items()} for row in rows]
    document = {"topology": base.topology, "schedule": base.schedule, "options": base.options.arguments,
                "time_s": base_s, "failures": rows, "provenance": ranking.provenance.to_dict()}  # fmt: skip
    return View(document, rows, [_answer(rows, base), *_table(rows, base)])


def _classes(base: Answer) -> list[tuple[list[Part], int]]:
    """The parts that are alike, those of them that are simulated, and how many there are.

    All of `MOST` parts; of more, those that carry most and those that carry least. Rings are sought anew around
    whatever is lost, which takes long, so for them one part stands for all.
    """
    classes, found = alike(base.on.topology, base.on.rank_speeds), dict[Hashable, list[Part]]()
    for part in parts_of(base.on.topology):
        own = (tuple(sorted(of[list(at)].tolist())) for of, at in zip(classes, (part.ranks, part.links), strict=True))
        found.setdefault((part.kind, *own), []).append(part)
    bytes_ = np.sum([one.link_bytes for one in base.passes], axis=0)
    busy_s = np.sum([np.array(one.busy_s, dtype=float) for one in base.passes], axis=0)

    def load(part: Part) -> float:
        """The bytes that pass a part, or else the seconds that it computes."""
        return max(map(float, bytes_[list(part.links)] if part.links else busy_s[list(part.ranks)]))

    def chosen(parts: list[Part]) -> list[Part]:
        if uses_rings(base.schedule) or len(parts) <= MOST:
            return parts[: 1 if uses_rings(base.schedule) else MOST]
        ordered = sorted(parts, key=load, reverse=True)
        return ordered[: MOST // 2] + ordered[-(MOST // 2) :]

    return [(chosen(parts), len(parts)) for parts in found.values()]


def _with(part: Part, asked: Question) -> tuple[Question, PreparedMachine]:
    """The question on the machine with a failure. Raises `TaspLabError` if that is none."""
    changed = replace(asked, without=part.without, overrides=part.overrides)
    on = prepare(changed)
    return with_machine(changed, on.machine), on


def _unchanged(part: Part, asked: Question, base: Answer) -> tuple[str | None, float]:
    """Why the schedule of an answer does not run with a failure, if so; and its time in seconds, infinite if so."""
    try:
        question, on = _with(part, asked)
    except TaspLabError as error:
        return str(error), inf
    found = answer(replace(question, schedule=base.question.schedule, options=base.options), on=on)
    reason = found.reason or ("it does not fit into a GPU" if is_too_large(found) else None)
    return (None, float(found.time_s)) if reason is None else (f"{base.schedule}: {reason}", inf)


def _best(
    part: Part, time_s: float, asked: Question, ranking: Ranking, given: Sequence[AnySchedule] | None
) -> tuple[str | None, float]:
    """The fastest schedule with a failure, if any, and its time in seconds; `time_s` is that of the unchanged one."""
    assert ranking.recommendation is not None, "there is an unchanged schedule"
    base = ranking.recommendation.answer
    best, bar = None if time_s == inf else base.schedule, Bar(1.0, time_s)
    try:
        question, on = _with(part, asked)
        questions = [replace(question, schedule=name)
                     for name in given or shipped_names(question.layer, on, question.options)[0]]  # fmt: skip
    except TaspLabError:
        return best, time_s
    answers = (*ranking.candidates, *ranking.settled) if on.machine.topology.world_size == base.world_size else ()
    before_s = {each.schedule: each.rank_s for each in answers if each.applies}
    # rings are sought last, as that takes longest
    for each in sorted(questions, key=lambda each: (uses_rings(each.name), before_s.get(each.name, inf))):
        if not bar.excludes(before_s.get(each.name, 0.0) / (1 + NEAR)):
            found = outcome_of(each, on, bar, screens=True)
            if found.time_s < time_s:
                best, time_s = each.name, found.time_s
    return best, time_s


def _answer(rows: Sequence[Row], base: Answer) -> str:
    """What to replace first, and why."""
    row, *others = (dict[str, Any](each) for each in rows)
    then = "no other schedule is much faster then" if row["best"] else "nor does another schedule"
    if row["reason"]:
        cost = "does not run"
        then = f"{row['best']} then takes {_times(row['best_factor'])}" if row["best"] else then
    elif row["factor"] <= 1 + COSTS:
        return f"No single failure makes {base.schedule} more than {COSTS:.1%} slower."
    else:
        cost = f"takes {_times(row['factor'])} ({format_time(base.time_s, 3)} to {format_time(row['time_s'], 3)})"
        if row["best_time_s"] < (1 - COSTS) * row["time_s"]:
            then = f"switching to {row['best']} leaves {_times(row['best_factor'])}"
        out = next((each for each in others if f"slow {each['kind']}" == row["kind"] and each["best"]), row)
        if out["best_factor"] < row["best_factor"]:
            then = f"taking it out leaves {_times(out['best_factor'])}, with {out['best']}"
    return f"Replace a {row['kind']} first: with{'out' * bool(row['without'])} one, {base.schedule} {cost}; {then}."


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def _table(rows: Sequence[Row], base: Answer) -> list[Shown]:
    """The table of failures, what it is of, and why the schedule does not run."""
    columns: Formats = {"lost": "{lost}", "such as": "{part}", "unchanged": "{then}", "factor": "{dearest}",
                        "best then": "{best}", "time": "{best_time_s:time}", "its factor": "{best_times}"}  # fmt: skip
    shown = []
    for row in map(dict[str, Any], rows):
        least, most, best = (_times(row[name]) for name in ("least_factor", "factor", "best_factor"))
        then = "does not run" if row["reason"] else format_time(row["time_s"])
        dearest = most if row["reason"] or least == most else f"{least} to {most}"
        shown.append(row | {"then": then, "dearest": dearest, "best_times": best})
    title = f"what each failure costs, over {base.schedule} on the whole machine, {format_time(base.time_s)}"
    where = f"{base.topology}, {captions.ranks_text(base)}{captions.software(base.on)}"
    reasons = (f"without {row['part']}: {row['reason']}" for row in rows if row["reason"])
    return [*Table.of(title, shown, columns, (0, 1, 4)), captions.title_of(base, where), *reasons, *base.on.changes,
            *captions.software_of(base), *captions.assumptions(base)]  # fmt: skip
