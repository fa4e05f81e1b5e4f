"""``tasp-lab study validate``: measure the points of a study that are nearest to a crossover."""

from __future__ import annotations

from typing import Annotated

from tasp_lab.cli.console import Progress, print_json, print_parts
from tasp_lab.cli.options import RUN, Json, whole
from tasp_lab.cli.options_find import Along, At, Between, StudyFolderPath


def validate(
    folder: StudyFolderPath,
    /,
    *,
    top: Annotated[int, whole("As many points, those nearest to a crossover first.", RUN)] = 5,
    at: At = None,
    along: Along = None,
    between: Between = None,
    repeat: Annotated[int, whole("Timed repetitions of each schedule.", RUN)] = 5,
    json: Json = False,
) -> None:
    """Run both schedules at the points nearest to a crossover on the emulated fabric, and compare with predictions.

    The rows are written into the folder, as validated.csv and validated.json.

    Example: tasp-lab study validate longctx/ --top 5
    """
    from tasp_lab.machines.sampling import NO_SAMPLES
    from tasp_lab.study.find.asked import asked_in
    from tasp_lab.study.find.chosen import those_at
    from tasp_lab.study.find.crossover_question import crossover_question
    from tasp_lab.study.find.crossovers import searched
    from tasp_lab.study.find.nearest import nearest
    from tasp_lab.study.find.validation import check_validation, measure_points

    check_validation(folder, top, repeat)
    given = asked_in(folder)
    question = crossover_question(
        given.study.find.get("crossover", {}), along=along, between=between or (), sampling=NO_SAMPLES
    )
    with Progress(lines_only=json) as shown:
        points = those_at(given.study.points(), at or "")
        groups = searched(points, question, given.evaluate, progress=shown.line)
        found = measure_points(nearest(groups, top), question.along, folder, repeat, shown.line)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
