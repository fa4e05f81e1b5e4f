"""What the documents state can be checked: commands, options, names, output, length and links."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import tasp_lab
from tasp_lab.cli.app import app_of
from tasp_lab.cli.process import main
from tasp_lab.measure.fit.cases import Simulated, cases_of
from tasp_lab.measure.profiles import Choice
from tasp_lab.measure.readers import MeasuredTable
from tasp_lab.prediction.columns import COLUMNS
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.registry import SCHEDULES
from tests.conftest import ROOT, Command
from tests.docs.documents import DOCUMENTS, Block, blocks, commands, inline_code, prose, redirected, shown
from tests.measure.fit.test_fit_profile import H100, csv, log, table
from tests.measure.test_calibrate_kernels import HEAD, times
from tests.support.selection import IS_FULL

OF_OTHER_TOOLS = {
    "--tensor-parallel-size",
    "--decode-context-parallel-size",
    "--dcp-comm-backend",
    "--tp-size",
    "--dcp-size",
    "--nproc-per-node",
    "--showtopo",
    "--nnodes",
    "--node-rank",
    "--rdzv-endpoint",
    "--kill-on-bad-exit",
    "--strict",
    "--slave",
    "--net",
}
OF_TRAIN_GPT = {"--text", "--sequence-parallel", "--checkpoint-activations", "--save", "--save-every", "--resume",
                "--learning-rate", "--seed", "--linear-schedule"}  # fmt: skip

SHELL = ("sh", "bash", "console", "")


def known_options() -> set[str]:
    """Every option of every command."""
    found = {"--help", "--version", "--install-completion"}
    open_apps = [app_of()]
    while open_apps:
        each = open_apps.pop()
        open_apps += [each[name] for name in each if not name.startswith("-")]
        if each.default_command is not None:
            found |= {name for argument in each.assemble_argument_collection() for name in argument.names}
    return found


def ident(block: Block) -> str:
    return f"{block.document.name}-{block.text[:40]}"


def test_every_option_in_a_document_exists() -> None:
    known = known_options() | OF_OTHER_TOOLS | OF_TRAIN_GPT
    assert {"--schedule", "--plot", "--in-place", "--no-trim", "--link-bandwidth"} <= known
    missing = [
        f"{document.name}: {option}"
        for document in DOCUMENTS
        for code in inline_code(document)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)
        if option not in known
    ]
    assert missing == []


@pytest.mark.parametrize("block", [block for block in blocks(*SHELL) if any(commands(block))], ids=ident)
def test_every_command_in_a_document_can_be_parsed(block: Block) -> None:
    for arguments in commands(block):
        app_of().parse_args(arguments, exit_on_error=False, print_error=False)


PRINTED = [
    (arguments, output)
    for block in blocks("console")
    for arguments, output in shown(block)
    if arguments[0] in ("predict", "decompose", "compare") and output.strip()
]


@pytest.mark.parametrize(("arguments", "output"), PRINTED, ids=[" ".join(arguments) for arguments, _ in PRINTED])
def test_documents_show_what_the_command_prints(
    arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions are exact, so their output is compared word by word; a document may show its beginning only."""
    main(arguments)
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.startswith(output.rstrip())


NOT_RUN: dict[tuple[str, str], str] = (
    {}
    if IS_FULL
    else {
        ("README.md", "plan"): "takes half a minute",
        ("README.md", "search"): "takes half a minute",
        ("calibration.md", "calibrate all_gather.log"): "takes ten seconds; tests/measure/fit reads such logs",
        ("calibration.md", "predict my.toml"): "needs what calibrate writes",
        ("choosing.md", "compare"): "takes ten seconds each; tests/cli/test_compare.py runs short ones",
        ("search.md", ""): "takes half a minute; tests/cli/test_outputs.py runs a short one",
    }
)
NOT_RUN |= {
    ("attention.md", ""): "takes minutes: long layers on many schedules; tests/cli/test_attention.py runs short ones",
    ("README.md", "compare"): "takes ten seconds; tests/cli runs short ones",
    ("README.md", "study"): "takes minutes; tests/study runs studies",
    ("calibration.md", "calibrate full-mesh:4 --fabric torchrun"): "torchrun starts it; tests/runtime/test_torchrun.py",
    (
        "calibration.md",
        "calibrate full-mesh:4 --fabric emulated",
    ): "needs root; tests/cli runs it where that is allowed",
    ("fabrics.md", "validate"): "needs root or torchrun",
    ("gpus.md", ""): "needs GPUs",
    ("one_gpu.md", ""): "needs a GPU; tests/validation/test_measurements.py",
    ("hybrids.md", "compare"): "takes ten seconds each; tests/cli/test_hybrids.py runs short ones",
    ("kernels.md", "calibrate --kernels live"): "times kernels for a minute; tests/runtime",
    ("nccl-and-collectives.md", "validate"): "needs root",
    ("plan.md", "plan h100-4x8"): "takes a minute; tests/planning plans small steps",
    ("studies.md", "study"): "takes minutes; tests/study runs studies",
    ("tutorial.md", "validate"): "needs root",
}
"""Commands in blocks without output that are not run here: the document, how they begin, and why."""

RUN = [
    block for block in blocks("sh", "bash") if block.document.parent in (ROOT, ROOT / "docs") and any(commands(block))
]


def reason_not_to_run(document: str, command: str) -> str:
    return next((why for (name, begin), why in NOT_RUN.items() if name == document and command.startswith(begin)), "")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the files that the documents speak of: of a machine a tenth slower than its profile."""
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    return folder


@pytest.mark.parametrize("document", sorted({block.document for block in RUN}), ids=lambda path: path.name)
def test_commands_of_a_document_run(document: Path, command: Command, samples: Path) -> None:
    """One after the other in a folder with the files of other tools that they read."""
    shutil.copytree(samples, command.folder, dirs_exist_ok=True)
    failed = []
    for block in (each for each in RUN if each.document == document):
        for arguments, target in redirected(block):
            if reason_not_to_run(document.name, " ".join(arguments)):
                continue
            done = command(*arguments)
            if done.returncode:
                failed.append(f"{' '.join(arguments)}: {done.stderr.splitlines()[-1:]}")
            if target:
                (command.folder / target).write_text(done.stdout)
    assert failed == []


def write_samples(folder: Path) -> None:
    """Logs and tables of tools, descriptions of machines, and a schedule."""
    for name, collective in (("all_gather", "all_gather"), ("sendrecv", "sendrecv")):
        (folder / f"{name}.log").write_text(log(slower(collective)))
    (folder / "my-cluster").mkdir()
    for collective in ("all_gather", "reduce_scatter"):
        (folder / "my-cluster" / f"{collective}.csv").write_text(csv(slower(collective), "h100-8"))
    (folder / "topology.txt").write_text((ROOT / "tests/machines/samples/h100-8.nvidia-smi.txt").read_text())
    ports = "".join(f"{rank},leaf,450GB/s,300ns,yes\n" for rank in range(8))
    (folder / "links.csv").write_text(f"source,destination,bandwidth,latency,both_ways\n{ports}")
    (folder / "times.csv").write_text(HEAD + times("H100", slower=1.3))
    mine = next(each.text for each in blocks("python") if '@schedule("doubling"' in each.text)
    (folder / "mine.py").write_text(mine)


def slower(collective: NcclTestsName) -> MeasuredTable:
    sizes = [2**power for power in range(28, 33)]
    (case,) = cases_of([table(collective, np.ones(len(sizes)), sizes)], Choice(H100, "8"))
    return table(collective, 1.1 * Simulated(H100, [case])(H100.parameters), sizes)


def test_every_exception_is_a_command_of_a_document() -> None:
    every = [(block.document.name, " ".join(each)) for block in RUN for each in commands(block)]
    assert [key for key in NOT_RUN if not any(name == key[0] and line.startswith(key[1]) for name, line in every)] == []


@pytest.mark.parametrize("block", list(blocks("python")), ids=ident)
def test_python_in_a_document_uses_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("tasp_lab", "sim", "runtime"):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tasp_lab":
            assert node.attr in tasp_lab.__all__


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/tutorial.md", "docs/reference/index.md", "docs/decomposition.md", "docs/schedules.md",
     "docs/how_it_works.md", "docs/topologies.md"],
)  # fmt: skip
def test_python_in_a_document_runs(name: str) -> None:
    """The blocks of a document, one after another."""
    names: dict[str, object] = {}
    try:
        for block in blocks("python"):
            if block.document == ROOT / name:
                exec(compile(block.text, name, "exec"), names)
    finally:
        for mine in ("doubling", "both-ways"):  # which a document registers
            SCHEDULES.pop(mine, None)


def test_every_name_of_code_in_a_document_exists() -> None:
    names = {
        (document.name, code)
        for document in DOCUMENTS
        for code in inline_code(document)
        if re.fullmatch(r"(tasp_lab|sim|runtime)(\.\w+)+", code)
        and code.removeprefix("tasp_lab.") not in tasp_lab.__all__
    }
    assert len(names) > 20
    assert sorted(f"{document}: {name}" for document, name in names if not exists(name)) == []


def exists(name: str) -> bool:
    """Whether this is a module, or something in one.

    >>> exists("tasp_lab.core.units.parse_time_s"), exists("tasp_lab.core.units.parse"), exists("tasp_lab.unit.parse")
    (True, False, False)
    """
    try:
        importlib.import_module(name)
        return True
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return False


def test_columns_that_a_document_explains_are_in_tables() -> None:
    table = prose(ROOT / "docs/attention.md").partition("| column | meaning |\n")[2].partition("\n\n")[0]
    titles = [title for line in table.splitlines()[1:] for title in line.split("|")[1].strip().split("; ")]
    assert len(titles) > 8
    assert set(titles) <= {column.title for column in COLUMNS}


def test_the_readme_is_one_screen_of_links() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_of_prose_are_short(document: Path) -> None:
    """Tables aside."""
    lines = prose(document).splitlines()
    assert [line for line in lines if len(line) > 150 and not line.startswith("|")] == []


def test_the_citation_has_what_its_format_requires_and_the_version_of_the_changelog() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert (citation["version"], str(citation["date-released"])) == newest.groups()


def rows(path: str) -> list[dict[str, str]]:
    """The rows of all tables of a document, each by its columns."""
    found, header = list[dict[str, str]](), list[str]()
    for line in (ROOT / path).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and header and not set(line) <= set("|:- "):
            found.append(dict(zip(header, cells, strict=True)))
        header = header or cells if cells else []
    return found


@pytest.mark.parametrize(
    ("document", "results", "least"),
    [
        ("README.md", "experiments/results/all_gather.md", 6),
        ("README.md", "experiments/ranking_benchmark/leaderboard.md", 4),
        ("docs/decomposition.md", "experiments/results/decompositions.md", 6),
    ],
)
def test_tables_of_documents_are_those_of_the_results(document: str, results: str, least: int) -> None:
    """Some of their rows and columns."""
    measured = rows(results)
    columns = set(measured[0])
    copied = [row for row in rows(document) if row.keys() <= columns]
    assert len(copied) >= least
    assert [row for row in copied if not any(row.items() <= each.items() for each in measured)] == []
