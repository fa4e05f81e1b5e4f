"""``python -m experiments.ranking_benchmark``: the leaderboard, and a submission beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.common import table
from experiments.ranking_benchmark.benchmark import COLUMNS, leaderboard, load_questions, read_submission, score
from tasp_lab.core.errors import TaspLabError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the leaderboard with a submission, if one is given. 2 after one line for a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m experiments.ranking_benchmark", description=__doc__)
    parser.add_argument("submission", nargs="?", type=Path, help="a CSV file with the columns row and time_s")
    parser.add_argument("--pairs", type=Path, help="a CSV file with first, second and probability_first_faster")
    asked = parser.parse_args(arguments)
    try:
        questions = load_questions()
        found = leaderboard(questions)
        if asked.submission is not None:
            mine = score(questions, read_submission(asked.submission, questions, asked.pairs))
            found = {asked.submission.name: mine} | found
    except TaspLabError as error:
        print(error, file=sys.stderr)
        return 2
    print(table([{"predictor": name, **figures} for name, figures in found.items()], COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
