"""Cases of tests of other projects: which can be said in the language of tasp-lab, and whether ranks compute them.

python -m experiments.tables.ported_cases                 # all that can be said, some minutes; writes the table
python -m experiments.tables.ported_cases --only LASP     # those with this in project or name, printed only
python -m experiments.tables.ported_cases --list          # how each case is said, or what is missing
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from experiments.common import RESULTS, markdown_table, write_page
from experiments.ported_cases.cases import BEFORE, NEEDS, cases, known
from experiments.ported_cases.runs import FACTOR, FP32_LIMIT, LSE_LIMIT, Verdict, drawn, verdicts_of


def page(verdicts: Sequence[Verdict]) -> str:
    """The tables of all cases, of which these have been run."""
    rows, of_features = [], []
    for project in dict.fromkeys(case.project for case in cases()):
        own = [case for case in cases() if case.project == project]
        ran = [each for each in verdicts if each.run.case.project == project]
        missing = Counter(each for case in own for each in case.needs - known())
        said = [sum(case.needs <= language for case in own) for language in (frozenset(), known())]
        counts = [len(own), *said, len(ran), sum(each.has_passed for each in ran)]
        why = ", ".join(f"{each}: {count}" for each, count in missing.most_common())
        rows.append([f"[{project}]({own[0].source})", *map(str, counts), why])
    for feature in NEEDS:
        own = [case for case in cases() if feature in case.needs]
        ran = [each for each in verdicts if feature in each.run.case.needs]
        counts = [len(own), sum(case.needs <= known() for case in own), len(ran), sum(each.has_passed for each in ran)]
        of_features.append([feature, *map(str, counts)])
    failed = [
        f"- {each.run.case.project}, {each.run.case.name}, `{each.run.schedule}` on {len(each.run.order)} ranks: "
        f"{each.error or f'{each.tensor} {each.worst:.2f} of the limit'}"
        for each in verdicts
        if not each.has_passed
    ]
    head = ["project", "cases", f"said at {BEFORE}", "said now", "run", "passed", "not said now, since it needs"]
    paragraphs = [
        "# Cases of other projects' tests",
        "Made by `python -m experiments.tables.ported_cases` from the shapes and masks in "
        "`experiments/ported_cases/*.toml`. Lengths are divided, all else is as in the tests.",
        "Each case that can be said runs both passes on 3 to 8 processes in a random order, by a schedule drawn from "
        "those that apply, and is compared with float64 on one process. Limits of errors in norm are "
        f"{FACTOR} times that of PyTorch's attention in the dtype of the case, of linear attention "
        f"of that of the exact result, rounded, but {FP32_LIMIT:g} at least. Log-sum-exps differ by at most "
        f"{LSE_LIMIT:g}, gradients of sinks by three standard deviations of the rounding of one process.",
        markdown_table(head, rows),
        f"What cases need beyond the language of {BEFORE}, some more than one of these:",
        markdown_table(["what", "cases", "said now", "run", "passed"], of_features),
        f"The largest error is {max((each.worst for each in verdicts), default=0.0):.0%} of its limit.",
    ]
    return "\n\n".join([*paragraphs, *(["Failed:", "\n".join(failed)] if failed else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run cases of other projects' tests.")
    parser.add_argument("--only", metavar="TEXT", default="", help="those with this text in their project or name")
    parser.add_argument("--list", action="store_true", help="print how cases are said, run none")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if options.only in f"{case.project} {case.name}"]
    if options.list:
        print(*(f"{case.project}, {case.name}: {case.says}" for case in chosen), sep="\n")
        return 0
    found = []
    for each in verdicts_of(drawn(case) for case in chosen if case.needs <= known()):
        found.append(each)
        print(f"{each.run.case.project}, {each.run.case.name}: {each.run.schedule} on {len(each.run.order)} ranks, "
              f"{each.error or f'{each.tensor} {each.worst:.0%} of the limit'}", flush=True)  # fmt: skip
    if not options.only:
        write_page(RESULTS / "ported_cases.md", page(found))
    return int(not all(each.has_passed for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
