"""How large tasp-lab is, and how much of it runs for one question: figures at the start, the budget, and now.

``python -m experiments.benchmarks.structure`` counts the checkout that it belongs to. ``--root FOLDER --start`` counts
another checkout, and stores its figures as those of the start. Results in ``experiments/benchmarks/results/``:
``structure.json`` and ``structure.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from experiments.benchmarks import structure_walk
from experiments.benchmarks.structure_counts import count_lines, count_source, count_words
from experiments.common import Record, machine_record, markdown_table, write_record
from tasp_lab.core.files import write_whole

PACKAGES = ("tasp_lab", "sim", "runtime")
"""The product: folders of the checkout."""
DOCUMENTS = ("docs/**/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
CLI = "tasp_lab.cli.process:main"
SIMULATE = "sim.simulate:simulate"
RUNTIME = "runtime"

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"

PREDICT = "predict mi300x-8 --schedule ring --shard-bytes 64MiB"
COMPARE = "compare h100-8 --seq 16Ki --kv-heads 8 --mask causal --pass both"
PLAN = "plan h100-4x8 --model llama-3-8b --seq 64Ki --batch-tokens 2Mi"
ACCURACY = "accuracy tasp_lab/measure/tables/h100_xxrjun_1x8_all_gather.csv"
ATTENTION = "runtime.attention, tasp, causal, forward and backward, on one of 2 ranks"
RANKS = 2

WHICH = ("before", "aim", "now")
"""The figures of the start, those aimed at, and those of the checkout."""

FIGURES = {
    "product_lines": f"lines of {', '.join(PACKAGES)}",
    "experiment_lines": "lines of experiments",
    "test_lines": "lines of tests",
    "document_words": f"words of {', '.join(DOCUMENTS)}",
    "modules": "modules of the product, packages included",
    "single_importers": "modules with one importer in the product or none",
    "classes": "classes",
    "report_subclasses": "subclasses of Report",
    "to_dict": "definitions of to_dict",
    "cycles": "cycles of imports inside packages",
    "cycles_across_packages": "cycles of imports across packages",
    "comment_share": "lines with a comment",
    "imports_median": "modules of the product that a module imports: median",
    "imports_most": "of one module in ten: at least",
    "predict_functions": f"functions that run for `{PREDICT}`",
    "predict_modules": "modules that run for it",
    "predict_packages": "packages that run for it",
    "compare_functions": f"functions that run for `{COMPARE}`",
    "plan_functions": f"functions that run for `{PLAN}`, in its first process",
    "accuracy_functions": f"functions that run for `{ACCURACY}`, in its first process",
    "attention_functions": f"functions that run for {ATTENTION}",
    "attention_modules": "modules that run for it",
    "attention_packages": "packages that run for it",
    "simulations": f"simulations of `{COMPARE}`",
    "compare_cpu_s": "processor seconds of it",
}
"""Name in the JSON file, and meaning."""

BUDGETS = {
    "core": 1_500, "topology": 2_200, "workload": 1_600, "rings": 2_800, "schedule": 4_700,
    "schedules + synthesis": 7_800, "machines": 5_600, "sim": 4_900, "prediction + planning": 7_500, "measure": 3_900,
    "validation": 1_200, "study": 3_700, "plots + timeline": 1_400, "formats": 1_400, "runtime": 9_000, "cli": 2_100,
}  # fmt: skip
"""The most lines of each package, or of several together."""

AIMS = {
    "product_lines": 62_000, "experiment_lines": 6_500, "test_lines": 46_000, "document_words": 30_000,
    "single_importers": 45, "classes": 480, "report_subclasses": 5, "to_dict": 8, "cycles": 0,
    "cycles_across_packages": 0, "comment_share": 0.03, "imports_median": 4, "imports_most": 10,
    "predict_functions": 550, "predict_modules": 85, "predict_packages": 16, "package_lines": BUDGETS,
}  # fmt: skip


def main() -> None:
    """Count, and write the results; figures of the start stay unless they are counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    parser.add_argument("--start", action="store_true", help="store the figures as those of the start")
    asked = parser.parse_args()
    path = RESULTS / "structure.json"
    stored: Record = json.loads(path.read_text()) if path.exists() else {}
    stored |= {"aim": AIMS, "before" if asked.start else "now": measure(asked.root.resolve())}
    write_record(path, {which: stored[which] for which in WHICH if which in stored})
    write_whole(RESULTS / "structure.md", table(stored).encode())


def measure(root: Path) -> Record:
    """All figures of a checkout, and the lists behind them."""
    counts = count_source(root, PACKAGES)
    predict = _walk(root, task="command", cli=CLI, arguments=PREDICT.split())
    attention = _walk_ranks(root)
    others = {"compare": COMPARE, "plan": PLAN, "accuracy": ACCURACY}
    functions = {
        name: _walk(root, task="command", cli=CLI, arguments=line.split())["functions"] for name, line in others.items()
    }
    simulations = _walk(root, task="simulations", cli=CLI, simulate=SIMULATE, arguments=COMPARE.split())
    return {
        "commit": _commit(root),
        "product_lines": counts.lines,
        "experiment_lines": count_lines(root, "experiments"),
        "test_lines": count_lines(root, "tests"),
        "document_words": count_words(root, DOCUMENTS),
        "modules": counts.modules,
        "single_importers": len(counts.single_importers),
        "classes": counts.classes,
        "report_subclasses": len(counts.report_subclasses),
        "to_dict": counts.to_dict,
        "cycles": len(counts.cycles),
        "cycles_across_packages": len(counts.cycles_across_packages),
        "comment_share": counts.comment_share,
        "imports_median": median(counts.imports),
        "imports_most": counts.imports[len(counts.imports) * 9 // 10],
        "package_lines": {names: _package_lines(root, names) for names in BUDGETS},
        **{f"predict_{name}": value for name, value in predict.items()},
        **{f"{name}_functions": count for name, count in functions.items()},
        **{f"attention_{name}": value for name, value in attention.items()},
        "simulations": simulations["simulations"],
        "compare_cpu_s": simulations["cpu_s"],
        "modules_in_cycles": [list(cycle) for cycle in counts.cycles],
        "modules_in_cycles_across_packages": [list(cycle) for cycle in counts.cycles_across_packages],
        "modules_with_one_importer": counts.single_importers,
    }


def _package_lines(root: Path, names: str) -> int:
    """Lines of packages of the product that are listed as "study + plots"."""
    return sum(count_lines(root, name if name in PACKAGES else f"{PACKAGES[0]}/{name}") for name in names.split(" + "))


def _walk(root: Path, **request: object) -> Record:
    process = _start(root, request)
    return _answer(process)


def _walk_ranks(root: Path) -> Record:
    """What runs on rank 0 of a call on `RANKS` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"task": "attention", "runtime": RUNTIME, "ranks": RANKS, "store": f"{folder}/store"}
        ranks = [_start(root, request | {"rank": rank}) for rank in range(RANKS)]
        first, *_ = [_answer(process) for process in ranks]  # waits for all: they leave the process group together
        return first


def _start(root: Path, request: Mapping[str, object]) -> subprocess.Popen[str]:
    line = json.dumps({"root": str(root), "packages": PACKAGES, **request})
    # -P: the folder of the script is not searched for modules, which are those of the checkout
    return subprocess.Popen(
        [sys.executable, "-P", structure_walk.__file__, line], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _answer(process: subprocess.Popen[str]) -> Record:
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"a walk ended with exit code {process.returncode}: {err.strip()}")
    answer: Record = json.loads(out.splitlines()[-1])
    return answer


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def table(stored: Record) -> str:
    """The document with the figures, and the cycles that are left."""
    rows = [
        [meaning, *(_cell(name, stored.get(which, {}).get(name)) for which in WHICH)]
        for name, meaning in FIGURES.items()
    ]
    sizes = [
        [names, *(_cell(names, stored.get(which, {}).get("package_lines", {}).get(names)) for which in WHICH)]
        for names in BUDGETS
    ]
    made = machine_record()
    commits = {which: stored.get(which, {}).get("commit", "-") for which in ("before", "now")}
    head = (
        "Size of tasp-lab and what runs for one question, made by `python -m experiments.benchmarks.structure` "
        f"({made['date']}). Start: commit {commits['before']}. Now: commit {commits['now']}, or changes on top.\n\n"
        "Lines are all lines of Python files. Imports inside functions, imports for type checkers and dotted names "
        "of modules in strings count as imports; only statements count in cycles. Functions, modules and packages "
        "that run are distinct ones of the product. Bodies of classes, lambdas and comprehensions count as functions, "
        "bodies of modules do not."
    )
    cycles = (stored["now"] if "now" in stored else stored["before"])["modules_in_cycles"]
    listed = "\n".join(f"- {', '.join(cycle)}" for cycle in cycles) or "There are none."
    columns = ("start", "aim", "now")
    return (
        f"{head}\n\n{markdown_table(('what', *columns), rows)}\n\n"
        f"## Lines of packages\n\n{markdown_table(('packages', *columns), sizes)}\n\n"
        f"## Cycles of imports inside packages\n\n{listed}\n"
    )


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "comment_share":
        return f"{value:.1%}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    main()
