"""The columns of answers: what each is called, where it stands, and what it means.

    Column("flops", "of all ranks", lambda a: a.flops, json=LAYER)

``--json``, data frames, the tables of the command line, the key sets of tests and `docs/json.md` follow from `COLUMNS`,
so a new column is one entry. The unit follows from the name: seconds (``_s``), bytes (``_bytes``), bytes or FLOPs per
second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from tasp_lab.core.tables import Table
from tasp_lab.core.units import Number, format_bandwidth, format_regret, format_size_about, format_time
from tasp_lab.machines.stack import shipping
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.paired import setting_of
from tasp_lab.workload.layer import window_text

View = Literal["collective", "layer", "ranking", "study"]
"""Where columns stand: in predictions of collectives, in predictions of layers, in a ranking of `compare`, or in the
rows of studies."""

COLLECTIVE: tuple[View, ...] = ("collective",)
LAYER: tuple[View, ...] = ("layer",)
RANKING: tuple[View, ...] = ("ranking",)
STUDY: tuple[View, ...] = ("study",)
PREDICTED = COLLECTIVE + LAYER
LAYERS = LAYER + RANKING
ALL = PREDICTED + RANKING

Subject = TypeVar("Subject")
"""What has a value in the column."""


@dataclass(frozen=True)
class Column(Generic[Subject]):
    """A column of answers, or of whole steps (`tasp_lab.prediction.step_results.STEP_COLUMNS`).

    Parameters
    ----------
    name : of the field of ``--json`` and the column of a data frame; empty for a column of tables alone.
    meaning : one line of `docs/json.md`.
    value : of an answer, by default its attribute of this name; of an answer that does not apply it is not asked,
        unless `always`. None of a column that a study fills, since it has a value in rows without an answer, too.
    json : the views whose JSON has the field.
    title : of the column of tables; empty without one.
    tables : the views whose tables have the column; by default those of `json`.
    cell : the text in a table; the second answer is the one that speed-ups are over. By default by the name's unit.
    when : whether an answer has this column, where not all have.
    always : whether the value of an answer that does not apply is asked for, too; otherwise it is null.
    explains : whether it takes a simulation of its own, so that only ``--explain`` shows it.
    tells_apart : of study rows: whether points that differ in this column are different questions.
    """

    name: str
    meaning: str
    value: Callable[[Subject], object] | Literal[""] | None = ""
    json: tuple[View, ...] = ()
    title: str = ""
    tables: tuple[View, ...] | None = None
    cell: Callable[[Subject, Subject | None], str] | None = None
    when: Callable[[Subject], bool] | None = None
    always: bool = False
    explains: bool = False
    tells_apart: bool = False

    def of(self, answer: Subject) -> Any:
        """The value of an answer, for JSON; of times and rates as a float."""
        found: Any = self.value(answer) if callable(self.value) else getattr(answer, self.name)
        return float(found) if self.name.endswith("_s") and found is not None else found

    def is_shown_in(self, view: View) -> bool:
        """Whether tables of a view have the column."""
        return bool(self.title) and view in (self.json if self.tables is None else self.tables)

    def text(self, answer: Subject, first: Subject | None) -> str:
        """The cell of a table."""
        if self.cell is not None:
            return self.cell(answer, first)
        value = self.of(answer)
        if value is None:
            return "-"
        if self.name.endswith("_bytes_per_s"):
            return format_bandwidth(value)
        if self.name.endswith("_s"):
            return format_time(value)
        return format_size_about(value) if isinstance(value, int) else str(value)


def ratio(a: Number, b: Number) -> float:
    """a / b for times; 1 when b is 0."""
    return float(a) / float(b) if float(b) else 1.0


def _shipped_by(answer: Answer) -> list[str]:
    """The stacks that ship the schedule of an answer for its layer; none for one that was built elsewhere."""
    if not isinstance(answer.question.schedule, str):
        return []
    accelerator = "" if answer.machine is None else answer.machine.accelerator
    asked = answer.options
    found = shipping(answer.schedule, answer.layer, answer.world_size, asked.passes, accelerator, asked.groups)
    return [stack.name for stack, _ in found]


MOST_NAMED = 3
"""Stacks that a table names; of more, how many there are besides."""


def _few_stacks(answer: Answer, _: Answer | None) -> str:
    if answer.on.stack:
        return ""
    names = _shipped_by(answer)
    more = f" +{len(names) - MOST_NAMED}" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more or "-"


def _measured_error(answer: Answer, _: Answer | None) -> str:
    if answer.measured_s is None or answer.measured_prediction_s is None:
        return ""
    if answer.not_comparable is not None:
        return "not a prediction"
    return f"{ratio(answer.measured_prediction_s, answer.measured_s) - 1:+.1%}"


def _pass(answer: Answer, _: Answer | None) -> str:
    """The pass with its dataflow."""
    return answer.passing + (f", {answer.dataflow}" if answer.passing == "backward" and answer.dataflow else "")


def _time(value: Number | None) -> str:
    return "" if value is None else format_time(value)


def _is_hybrid(answer: Answer) -> bool:
    return answer.computes and answer.layer.kind == "hybrid"


_PREDICTIONS: tuple[Column[Answer], ...] = (
    # What was asked.
    Column("schedule", "its name", json=ALL, title="schedule", always=True),
    Column("", "the pass", title="pass", tables=LAYER, cell=_pass, when=lambda a: a.options.passes != "forward"),
    Column("options", "the options that apply to the schedule, as an object",
           lambda a: {name: getattr(a.options, name) for name in a.applying}, RANKING, always=True),
    Column("collective", "`AllGather`, `ReduceScatter`, `AllReduce`, `AllToAll` or `SendRecv`", json=COLLECTIVE),
    Column("topology", "the name of the topology", json=PREDICTED, always=True),
    Column("world_size", "the number of ranks", json=PREDICTED, always=True),
    Column("shard_bytes", "the [size of the collective](nccl-and-collectives.md#collectives)", json=COLLECTIVE),
    Column("seq", "positions over all ranks", lambda a: a.layer.sequence, LAYER),
    Column("batch", "sequences", lambda a: a.layer.batch, LAYER),
    Column("heads", "query heads", lambda a: a.layer.heads, LAYER),
    Column("kv_heads", "key and value heads", lambda a: a.layer.kv_head_count, LAYER),
    Column("head_dim", "elements per head of queries and keys", lambda a: a.layer.head_dim, LAYER),
    Column("value_dim", "with `--value-dim`: elements per head of values and results", lambda a: a.layer.value_size,
           LAYER, when=lambda a: a.layer.value_size != a.layer.head_dim),
    Column("dtype", "of queries, keys, values and results", lambda a: a.layer.dtype, LAYER),
    Column("computes", "`softmax` or `linear` attention, or a `hybrid`", lambda a: a.layer.kind, LAYERS, always=True),
    Column("applies", "whether the schedule applies; if not, numbers are null", json=RANKING, always=True),
    Column("reason", "why it does not apply, or null", lambda a: a.reason or None, RANKING, always=True),
    Column("decay", "of linear attention: `none`, `head`, `scalar` or `channel`", lambda a: a.layer.decay, LAYER),
    Column("layers", "of a hybrid, such as `LLSLLS`", lambda a: a.layer.layers, LAYER, when=_is_hybrid),
    Column("linear_kv_heads", "of a hybrid: KV heads of linear layers", lambda a: a.layer.of("L").kv_head_count, LAYER,
           when=_is_hybrid),
    Column("mask", "`full`, `causal` or `ranges`", lambda a: a.layer.mask, LAYER),
    Column("ranges", "with `--ranges`: first query and end of queries, the same of keys, and kind, of each range",
           lambda a: [[[*each[0]], [*each[1]], each[2]] for each in a.layer.ranges or ()], LAYER,
           when=lambda a: a.layer.ranges is not None),
    Column("window", "the most keys that a query attends to, or null; of a full mask a text of how many before and "
           "after its position, -1 for all: `1023,-1`",
           lambda a: window_text(a.layer.window) if isinstance(a.layer.window, tuple) else a.layer.window, LAYER),
    Column("documents", "lengths of packed documents, or null", lambda a: a.layer.documents and [*a.layer.documents],
           LAYER),
    Column("cached_keys", "with `--cached-keys`: positions with keys and values only", lambda a: a.layer.cached_keys,
           LAYER, when=lambda a: bool(a.layer.cached_keys)),
    Column("sinks", "with `--sinks`: true, every softmax has a logit per head more", lambda a: a.layer.sinks, LAYER,
           when=lambda a: a.layer.sinks),
    Column("decode", "with `--decode`: true", lambda a: a.layer.decode, LAYER, when=lambda a: a.layer.decode),
    Column("values_in_keys", "with `--values-in-keys`: true", lambda a: a.layer.values_in_keys, LAYER,
           when=lambda a: a.layer.values_in_keys),
    Column("pass", "`forward`, `backward` or `both`", lambda a: a.passing, LAYER),
    Column("dataflow", "of the backward pass: `rotate-kv`, `rotate-kv-back`, `rotate-q` or null", json=LAYER),
    Column("gradient_dtype", "of gradients that are sent (of a hybrid, of softmax layers); null in a forward pass",
           json=LAYER),
    Column("trim", "whether blocks stop after the last rank whose mask needs them", lambda a: a.options.trim, LAYER),
    Column("buffers", "receive buffers per rank", lambda a: a.options.buffers, LAYER),
    Column("compute_flops_per_s", "the rate of the busiest rank; of both passes their mean rate", json=LAYER),
    # Times.
    Column("time_s", "end of the last transfer or kernel call; of both passes, times are sums", json=ALL, title="time"),
    Column("time_low_s", "lower end of the [interval](accuracy.md#how-sure-predictions-are); null with `--samples 0`",
           json=ALL),
    Column("time_high_s", "upper end of the interval", json=ALL),
    Column("interval", "its `median_s`, `regime` (the error class), its measured `rows` and `machines`, what is "
           "`borrowed` from other classes, and `samples` of the parameters; null with `--samples 0`",
           lambda a: None if a.interval is None else a.interval.record, PREDICTED, "interval", ALL,
           lambda a, _: "" if a.interval is None else a.interval.text),
    Column("rates_within", "by what share of its capacity a link may be filled too much or too little: 0.001 where 100 "
           "messages or more may share one, else 0", json=ALL),
    Column("first_is_faster", "the probability that the first schedule is faster than this one, by the errors that "
           "they do not share; null of the first", json=RANKING),
    Column("expected_regret", "how much longer than the fastest schedule this one is expected to take, as a share",
           json=RANKING, title="regret",
           cell=lambda a, _: "-" if a.expected_regret is None
           else "tie" if a.is_tied else format_regret(a.expected_regret).removesuffix(" slower")),
    Column("untuned_time_s", "with `--tune`: the time with the given options", lambda a: a.untuned_s, RANKING,
           "untuned", cell=lambda a, _: _time(a.untuned_s)),
    Column("", "over the first row", title="speed-up", tables=ALL,
           cell=lambda a, first: "-" if first is None else f"{ratio(first.time_s, a.time_s):.2f}x"),
    Column("busbw_bytes_per_s", "bus bandwidth as nccl-tests defines it", json=COLLECTIVE, title="busbw"),
    Column("compute_s", "kernel time of the busiest rank", json=LAYER, title="compute"),
    Column("exposed_s", "`time_s` - `compute_s`: what messages add", json=LAYERS, title="exposed",
           # a sum of many calls differs from their end by less than a femtosecond
           cell=lambda a, _: format_time(max(round(float(a.exposed_s), 12), 0))),
    Column("communication_s", "with `--explain`: time of the same schedule without kernel calls", json=LAYER,
           title="communication", explains=True),
    Column("contention_s", "with `--explain`: part of `time_s` due to messages that slow kernel calls; null where they "
           "do not", json=LAYER, title="contention", explains=True,
           cell=lambda a, _: "" if a.contention_s is None else f"{ratio(a.contention_s, a.time_s):.1%}"),
    Column("ccr", "with `--explain`: compute / communication; null without communication", json=LAYER, title="CCR",
           cell=lambda a, _: "-" if a.ccr is None else f"{a.ccr:.3g}", explains=True),
    # What it takes.
    Column("bytes_sent", "by all ranks", json=LAYER, title="bytes sent"),
    Column("bytes_per_rank", "the most bytes that a rank sends", json=RANKING, title="sent by a rank"),
    Column("relayout_bytes", "of a hybrid: the part of the bytes sent that moves hidden states between layouts",
           json=LAYERS, title="re-layout", tables=LAYER, when=_is_hybrid),
    Column("link_bytes", "bytes on the link that is occupied longest", json=RANKING, title="busiest link"),
    Column("buffer_bytes", "largest memory of a rank for blocks of other ranks and sums that are sent; of both passes "
           "the larger one", json=LAYERS, title="buffers", tables=RANKING),
    Column("cache_bytes", "with `--decode`: the most bytes of keys and values that a rank has", json=LAYER,
           title="cache", when=lambda a: a.layer.decode),
    Column("flops", "of all ranks", json=LAYER),
    Column("bound_s", "least time of any schedule of this work that starts with the same blocks", json=ALL,
           title="bound", tables=PREDICTED),
    Column("", "bound / time", title="share of bound", tables=ALL,
           cell=lambda a, _: f"{ratio(a.bound_s, a.time_s):.1%}"),
    Column("bottleneck", "`compute` if it takes half of the time, else the largest part of the critical path: `link`, "
           "`port`, `NIC`, `latency`, ...; for schedules with too many events `communication`",
           json=RANKING, title="bottleneck"),
    # What ran on a fabric.
    Column("measured_s", "with `--validate`: the median time on the fabric", json=RANKING, title="on the fabric",
           cell=lambda a, _: _time(a.measured_s)),
    Column("measured_prediction_s", "with `--validate`: the prediction for the fabric", json=RANKING, title="error",
           cell=_measured_error),
    Column("", "of a tuned schedule", title="options", tables=RANKING, cell=lambda a, _: a.options.arguments,
           when=lambda a: a.untuned_s is not None),
    Column("shipped_by", "the [stacks](stacks.md) that ship it for this layer", _shipped_by, RANKING,
           title="shipped by", cell=_few_stacks),
)  # fmt: skip


def _filled(meanings: Mapping[str, str], *, tells_apart: bool) -> tuple[Column[Answer], ...]:
    """Columns that a study fills: which point a row is, or where it is from."""
    return tuple(Column(name, meaning, None, STUDY, tells_apart=tells_apart) for name, meaning in meanings.items())


def _as_predicted(**meanings: str) -> tuple[Column[Answer], ...]:
    """Columns of predictions in the rows of studies, too; with another meaning where it is given."""
    known = {column.name: column for column in _PREDICTIONS}
    return tuple(
        Column(name, meaning or known[name].meaning, known[name].value, STUDY) for name, meaning in meanings.items()
    )


_ROWS: tuple[Column[Answer], ...] = (
    *_filled({"key": "hash of inputs, machine, schedules and model version"}, tells_apart=False),
    *_filled({
        "machine": "its name, expression or file",
        "nodes": "of the machine",
        "ranks": "of the machine",
        "library": "the communication library",
        "model": "whose layer it is, if any",
        "seq": "positions over all ranks",
        "batch": "sequences",
        "heads": "query heads",
        "kv_heads": "key and value heads",
        "head_dim": "elements per head",
        "dtype": "of queries, keys, values and results",
        "mask": "`full` or `causal`",
        "kind": "`softmax` or `linear` attention, or a `hybrid`",
        "passes": "`forward`, `backward` or `both`",
        "schedule": "its name",
        "variant": "its name; `as is` without changes",
        "overrides": "what the variant changes",
    }, tells_apart=True),
    # Numbers.
    *_as_predicted(time_s="", time_low_s="", time_high_s=""),
    Column("setting", "how schedules are compared, which errors of their order depend on: with a model of the "
           "`library`, by `links alone` without one or on PCIe, `exact` on ideal links",
           lambda a: setting_of(a.on), STUDY),
    Column("measured", "whether layers with its kernel calls and its host were measured, which errors of their order "
           "depend on, too", lambda a: a.is_measured, STUDY),
    *_as_predicted(compute_s="", exposed_s="",
                   bound_s="least time of the layer; of a `settled` row, of this schedule", bottleneck=""),
    Column("steps", "the steps of the schedules of all passes", json=STUDY),
    *_as_predicted(bytes_per_rank="", link_bytes="", buffer_bytes=""),
    Column("memory_bytes", "tensors of the layer, gradients and buffers of the rank with the most positions",
           json=RANKING + STUDY),
    Column("fits", "whether a GPU has that memory, or null", json=RANKING + STUDY),
    Column("engine", "`simpy` or `array`", lambda a: a.passes[0].engine, STUDY),
    Column("settled_by", "`simulation`, or `bound` if the lower bound exceeds the time of another schedule",
           lambda a: "simulation", STUDY),
    Column("search_complete", "whether a larger search budget would find the same rings", json=STUDY),
    *_filled({
        "version": "of tasp-lab",
        "models": "`MODEL_VERSION`",
        "constants": "hash of the machine",
        "digest": "hash of the schedules",
        "status": "`ok`, `settled`, `does not apply` or `failed`",
        "error": "why there is no answer",
        "inputs": "inputs of the point, as JSON",
    }, tells_apart=False),
)  # fmt: skip

COLUMNS: tuple[Column[Answer], ...] = (*_PREDICTIONS, *_ROWS)


def view_of(answer: Answer) -> View:
    """Where predictions of this work stand."""
    return "layer" if answer.computes else "collective"


def fields_of(answer: Answer, view: View, explain: bool = False) -> dict[str, object]:
    """The object of ``--json``; of a schedule that does not apply numbers are None.

    With `explain` also the fields that take simulations of their own.

    >>> from tasp_lab.prediction.evaluate import answer
    >>> from tasp_lab.prediction.question import Question
    >>> list(fields_of(answer(Question("full-mesh:2", "ring", 64)), "collective"))[:4]
    ['schedule', 'collective', 'topology', 'world_size']
    """
    found: dict[str, object] = {}
    for column in columns(view):
        if column.value is not None and explain >= column.explains and (column.when is None or column.when(answer)):
            found[column.name] = column.of(answer) if answer.applies or column.always else None
    return found


def columns(view: View) -> tuple[Column[Answer], ...]:
    """The columns of the JSON of a view."""
    return tuple(column for column in COLUMNS if view in column.json)


def names(view: View) -> tuple[str, ...]:
    """The fields of ``--json`` that all objects of a view have."""
    return tuple(column.name for column in columns(view) if column.when is None and not column.explains)


def answer_table(answer: Answer) -> Table:
    """The table of one answer, without speed-ups."""
    return table_of(answer.topology, view_of(answer), [answer], lambda each: None)


def table_of(
    title: str,
    view: View,
    answers: Sequence[Answer],
    first: Callable[[Answer], Answer | None],
    explain: bool = False,
) -> Table:
    """The table of answers that apply; `first` is the one that speed-ups of a row are over, None without one.

    Of a schedule that was not simulated it has the least time and what follows without one (`UNTIMED`).

    A column without any text is left out, and one that not all rows have; those that take simulations of their own
    are in it with `explain` only.
    """
    titles, rows = [], [list[str]() for _ in answers]
    for column in (column for column in COLUMNS if column.is_shown_in(view) and explain >= column.explains):
        if column.when is not None and not all(column.when(answer) for answer in answers):
            continue
        cells = [_cell(column, answer, first) for answer in answers]
        if any(cells):
            titles.append(column.title)
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)
    of_texts = ("schedule", "pass", "options", "bottleneck", "shipped by")
    texts = [position for position, name in enumerate(titles) if name in of_texts]
    known = {name: place for place, name in enumerate(FIRST)}
    order = sorted(range(len(titles)), key=lambda place: (known.get(titles[place], len(known)), place))
    return Table(title, titles, rows, texts, order)


def _cell(column: Column[Answer], answer: Answer, first: Callable[[Answer], Answer | None]) -> str:
    if answer.status != "settled":
        return column.text(answer, first(answer))
    if column.name == "time_s":
        return f"at least {format_time(answer.rank_s, 3)}"
    return column.text(answer, None) if column.name in UNTIMED else ""


UNTIMED = ("schedule", "options", "bytes_per_rank", "link_bytes", "buffer_bytes")
"""The columns of a schedule that do not need its time."""

FIRST = (
    "schedule",
    "pass",
    "options",
    "time",
    "regret",
    "speed-up",
    "buffers",
    "bottleneck",
    "interval",
    "busbw",
    "error",
)
"""The titles of the columns that a narrow table keeps, the most important first."""


def cells_of(answer: Answer, *titles: str) -> dict[str, str]:
    """Some cells of a table of predictions, by title, for tables with further columns."""
    view = view_of(answer)
    return {
        column.title: column.text(answer, None)
        for column in COLUMNS
        if column.title in titles and column.is_shown_in(view) and (column.when is None or column.when(answer))
    }


def rows_table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """A table of rows that all have the same columns."""
    shared = [column for column in rows[0] if all(column in row for row in rows)]
    texts = [position for position, column in enumerate(shared) if column in ("schedule", "pass", "options")]
    return Table(title, shared, [[row[column] for column in shared] for row in rows], texts)


def refused_table(answers: Iterable[Answer]) -> Table:
    """The table of the schedules that do not apply, each with the reason."""
    return Table("do not apply", ("schedule", "reason"), [(each.schedule, each.reason) for each in answers], (0, 1))
