"""Write the generated parts of the documents: ``python -m docs.generate``; tests/docs hold the committed ones equal.

Generated are what stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``, each by a function of `PARTS`,
and the output of the commands `predict`, `compare`, `plan`, `search` and `decompose` in console blocks. Long references
stand in no document: the site has them in place of a line that names them (`with_site_parts`).
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import Argument

from runtime.kernels.libraries import KernelCall, Overlap, RankZero
from tasp_lab.cli.app import app_of
from tasp_lab.cli.options import schedules_help
from tasp_lab.cli.process import main
from tasp_lab.core.units import format_size, format_time
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.measure.check import expected
from tasp_lab.measure.readers import COLLECTIVES as COLLECTIVES_OF_TESTS
from tasp_lab.planning.plan import PLAN_COLUMNS
from tasp_lab.prediction import columns, step_results
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.collectives.kinds import KINDS
from tasp_lab.schedules.registry import ATTENTION, COLLECTIVES, LINEAR, options_of
from tasp_lab.validation.measurements import COLUMNS, MEASUREMENTS, Measurement
from tasp_lab.workload.layer import Workload

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def table(*rows: tuple[str, ...]) -> str:
    """A table of Markdown; the first row is its head.

    >>> print(table(("a", "b"), ("x|y", "1")))
    | a | b |
    |---|---|
    | x\\|y | 1 |
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def attention_table() -> str:
    """The schedules of attention: layouts, what moves, and the options that apply."""
    rows = [("schedule", "sequence layout", "what moves, forward", "options")]
    for name, spec in ATTENTION.items():
        shown = f"{name}:{spec.split}" if spec.split else name
        options = " ".join(f"`{flag(option)}`" for option in options_of(f"{name}:2x2" if spec.split else name))
        rows.append((f"`{shown}`", layouts(f"{name}:2x2" if spec.split else name), spec.moves, options))
    return table(*rows)


def layouts(name: str) -> str:
    """The sequence layouts of a schedule, of a full and of a causal mask.

    >>> layouts("tasp"), layouts("ulysses")
    ('contiguous; causal: zigzag', 'contiguous')
    """
    full = attention_layout(name, Workload(sequence=64, heads=4, mask="full"), 4).name
    causal = attention_layout(name, Workload(sequence=64, heads=4, mask="causal"), 4).name
    full, causal = full.partition(" ")[0], causal.partition(" ")[0]  # that of a family names its group size, too
    return full if full == causal else f"{full}; causal: {causal}"


def flag(field: str) -> str:
    """The option of the command line for a field of `AttentionOptions`."""
    return "--no-trim" if field == "trim" else "--" + field.replace("_", "-")


def linear_table() -> str:
    """The schedules of linear attention."""
    return table(("schedule", "what moves, forward"), *((f"`{name}`", LINEAR[name].moves) for name in LINEAR))


def collectives_table() -> str:
    """The schedules of collectives."""
    rows = [("collective", "schedules", "`--shard-bytes`")]
    for kind, spec in KINDS.items():
        names = (f"`{name}`" for name, collective in COLLECTIVES.items() if collective.kind == kind)
        rows.append((kind, ", ".join(names), spec.shard))
    return table(*rows)


VIEWS: dict[columns.View, str] = {"collective": "C", "layer": "L", "ranking": "R", "study": "S"}
"""Letters of the views of answers in the table of fields."""


def fields_table() -> str:
    """The fields of answers: the views that have each, and its meaning."""
    views: dict[tuple[str, str], str] = {}
    for view, letter in VIEWS.items():
        for column in columns.columns(view):
            key = (f"`{column.name}`", column.meaning)
            views[key] = views.get(key, "") + letter
    return table(("field", "of", "meaning"), *((name, letters, text) for (name, text), letters in views.items()))


def step_fields_table() -> str:
    """The fields of whole steps."""
    return table(("field", "meaning"), *((f"`{column.name}`", column.meaning) for column in step_results.STEP_COLUMNS))


def plan_fields_table() -> str:
    """The fields of plans that rows of studies have, too."""
    return table(("field", "meaning"), *((f"`{column.name}`", column.meaning) for column in PLAN_COLUMNS))


def measurements_table() -> str:
    """What ``gpu-check --one --measure`` measures, in its order, then the cases of each."""
    rows = [("measurement", "minutes", "question", "tables", "what it changes")]
    for each in MEASUREMENTS:
        tables = " ".join(f"`{name}.csv`" for name in each.tables)
        rows.append((each.name, f"{each.minutes:g}", each.question, tables, each.changes))
    return "\n".join([table(*rows), "", *map(cases_of, MEASUREMENTS)])


def cases_of(measurement: Measurement) -> str:
    """An item with the libraries, shapes and settings of a measurement, each in the order of its cases."""
    libraries, others = dict[str, dict[str, None]](), dict[str, dict[str, None]]()
    for case in measurement.cases:
        batch, heads, kv_heads, head_dim, queries, keys, causal = case.shape
        length = f"{queries:,}" if queries == keys else f"{queries:,} on {keys:,}"
        libraries.setdefault(case.library, {}).update({case.variant: None} if isinstance(case, RankZero) else {})
        others.setdefault(f"{heads}/{kv_heads} heads of {head_dim}", {})[
            f"{f'{batch} x ' * (batch > 1)}{length}{' causal' * causal}"
        ] = None
        settings = {} if not isinstance(case, Overlap) else {
            "blocks": str(case.blocks), "copied": f"{case.copied_bytes >> 20} MiB", "after": f"{case.delay_us} us",
            "priority": "high" if case.high_priority else "normal",
        }  # fmt: skip
        settings |= {"pass": case.passing} if isinstance(case, KernelCall) else {}
        for name, value in settings.items():
            others.setdefault(name, {})[value] = None
    found = (*libraries.items(), *others.items())
    texts = (f"{name}: {', '.join(values)}" if values else name for name, values in found)
    text = f"- **{measurement.name}**, {len(measurement.cases)} cases. {'; '.join(texts)}."
    return textwrap.fill(text, 140, subsequent_indent="  ", break_on_hyphens=False)


def columns_of_measurements() -> str:
    """The columns of the tables that no command reads."""
    return table(("table", "columns"), *((f"`{name}.csv`", text) for name, text in COLUMNS.items()))


def all_commands(parent: App | None = None, path: str = "") -> Iterator[tuple[str, App]]:
    """Every command with its full name, in the order of the help."""
    parent = parent or app_of()
    for name in parent:
        if not name.startswith("-"):
            command = parent[name]
            if command.default_command is not None:
                yield f"{path}{name}", command
            yield from all_commands(command, f"{path}{name} ")


def meaning(argument: Argument) -> str:
    """The help of an argument, with its choices and its default."""
    text = argument.parameter.help or "The file." * (argument.names[0] == "FILE") or "The name."
    text = SCHEDULE_PAGES if text == schedules_help() else text
    default = argument.field_info.default
    if argument.show_default is True:
        text += f" Default: {str(default).lower() if isinstance(default, bool) else default}."
    elif callable(argument.show_default):
        text += f" Default: {argument.show_default(default)}."
    choices = argument.get_choices()
    return f"{text} One of {', '.join(choices)}." if choices else text


SCHEDULE_PAGES = (
    "A schedule of [collectives](nccl-and-collectives.md#collectives), [attention](attention.md#schedules) or "
    "[linear attention](linear_attention.md#schedules), or of [hybrids](hybrids.md) two names; repeatable."
)
"""Instead of the names of all schedules, which ``--help`` lists."""


def command_reference() -> str:
    """What each command does, the options that several share, and those of its own."""
    commands, users = dict(all_commands()), dict[tuple[str, str, str], list[str]]()
    for name, command in commands.items():
        for argument in command.assemble_argument_collection(parse_docstring=True):
            if argument.show:
                (group, *_) = argument.parameter.group  # type: ignore[misc]
                title = str(getattr(group, "name", group))
                names = ", ".join(f"`{name}`" for name in argument.names)
                users.setdefault((title, names, meaning(argument)), []).append(name)
    sections = dict[tuple[str, str], list[str]]()  # by title and commands
    for (group, names, text), of in users.items():
        shared = "" if len(of) == 1 else "all commands" if len(of) > 12 else ", ".join(of)
        sections.setdefault((group if shared else of[0], shared), []).append(item(names, text))
    parts = [table(("command", "what it does"), *((f"`{name}`", summary(app)) for name, app in commands.items()))]
    for heading, own in (("Options that commands share", False), ("Options of one command", True)):
        parts.append(f"## {heading}")
        chosen = {key: items for key, items in sections.items() if own is not bool(key[1])}
        for title in dict.fromkeys(title for title, _ in chosen):
            parts.append(f"### {title}")
            for (of_title, shared), items in chosen.items():
                if of_title == title:
                    parts += [f"Of {shared}:"] * bool(shared) + ["\n".join(items)]
    return "\n\n".join(parts)


def item(names: str, text: str) -> str:
    """An item of a list, in lines that are not too long."""
    wrapper = textwrap.TextWrapper(150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(f"- {names}: {text}")


def summary(command: App) -> str:
    """The first paragraph of the help of a command."""
    return " ".join(command.help.partition("\n\n")[0].split())


SIZES_ON_PAGE = (2**10, 2**16, 2**20, 2**24, 2**26, 2**28, 2**30, 2**33)


def expected_tables() -> str:
    """The expected times and bandwidths of the machines of all families, a section each."""
    parts = []
    for name in catalogue_names():
        machine = load_machine(name)
        if machine.system is not None and machine.topology.world_size <= MOST_RANKS:
            found, rows = expected(name, sizes=SIZES_ON_PAGE), [("size", *COLLECTIVES_OF_TESTS)]
            for size_bytes in SIZES_ON_PAGE:
                own = {row["collective"]: row for row in found.rows if row["size_bytes"] == size_bytes}
                rows.append((format_size(size_bytes), *(expected_cell(own.get(each)) for each in COLLECTIVES_OF_TESTS)))
            parts.append(f"## {name}\n\n{found.document['library']}\n\n{table(*rows)}")
    return "\n\n".join(parts)


MOST_RANKS = 16
"""Larger machines take the site too long to predict: the command prints them."""


def expected_cell(row: Mapping[str, Any] | None) -> str:
    """A time, a bandwidth and its interval."""
    if row is None:
        return ""
    rate, time_s = row["busbw_bytes_per_s"] / 1e9, row["expected_s"]
    low, high = rate * time_s / row["expected_high_s"], rate * time_s / row["expected_low_s"]
    return f"{format_time(time_s, 3)}, {rate:.3g} ({low:.3g} to {high:.3g})"


PARTS: dict[str, Callable[[], str]] = {
    "commands": command_reference,
    "attention": attention_table,
    "linear attention": linear_table,
    "collectives": collectives_table,
    "fields of answers": fields_table,
    "fields of steps": step_fields_table,
    "fields of plans": plan_fields_table,
    "measurements": measurements_table,
    "columns of measurements": columns_of_measurements,
    "expected bandwidths": expected_tables,
}

_PART = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SITE_PART = re.compile(r"^\*Made with the site \(`make site`\): ([\w ]+)\.\*$", re.MULTILINE)
_CONSOLE = re.compile(
    r"(?<=^```console\n)\$ tasp-lab ((?:predict|compare|plan|search|decompose) .*)\n((?:.+\n)+)(?=```$)", re.MULTILINE
)


def generated(text: str) -> str:
    """A document with its generated parts made anew."""
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[3]}", text)


def with_site_parts(text: str) -> str:
    """A page of the site with the parts that only the site has.

    >>> with_site_parts("*Made with the site (`make site`): linear attention.*")[:34]
    '| schedule | what moves, forward |'
    """
    return _SITE_PART.sub(lambda match: PARTS[match[1]](), text)


def with_output(text: str) -> str:
    """A document with what commands print today; where it showed the beginning only, as many lines of it."""
    return _CONSOLE.sub(lambda match: f"$ tasp-lab {match[1]}\n{printed(match[1], match[2].count(chr(10)))}", text)


def printed(arguments: str, lines: int) -> str:
    """The first lines of the output of a command; all of them if it printed no more."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        main(arguments.split())
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines()[:lines])


if __name__ == "__main__":
    for document in DOCUMENTS:
        text = document.read_text()
        written = with_output(generated(text))
        if written != text:
            document.write_text(written)
