"""``tasp-lab study sensitivity``: which constants move an answer of a study, and what would settle them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import Progress, print_json, print_parts
from tasp_lab.cli.options import OUTPUT, RUN, Json, whole
from tasp_lab.cli.options_find import FIND, At, Between, StudyPath


def sensitivity(
    path: StudyPath,
    /,
    *,
    at: At = None,
    of: Annotated[str | None, Parameter(group=FIND, help="speedup (over the baseline of the study) or time.")] = None,
    between: Between = None,
    by: Annotated[
        str | None,
        Parameter(
            group=FIND, help="Intervals of constants: 'source interval', 'source interval, else 20%', or 20% for all."
        ),
    ] = None,
    top: Annotated[
        int | None, whole("Constants in the table, the largest effects first; 5 if not given.", OUTPUT)
    ] = None,
    method: Annotated[
        str | None, Parameter(group=RUN, help="one-at-a-time (each constant at both ends) or sobol (all together).")
    ] = None,
    samples: Annotated[int | None, whole("Of the design of Sobol: a power of two, 64 if not given.", RUN)] = None,
    seed: Annotated[int, whole("Of the design of Sobol.", RUN)] = 0,
    json: Json = False,
) -> None:
    """List the constants of a machine that move the answer at one point of a study, over their own intervals.

    Example: tasp-lab study sensitivity longctx.toml --at machine=h100-8x8,model=llama-3-8b,seq=128Ki

    Example: tasp-lab study sensitivity longctx/ --at h100-8x8,128Ki --of time --between tasp --method sobol
    """
    from tasp_lab.study.find.asked import asked
    from tasp_lab.study.find.chosen import chosen
    from tasp_lab.study.find.sensitivity import find_sensitivity
    from tasp_lab.study.find.sensitivity_question import sensitivity_question

    study = asked(path).study
    question = sensitivity_question(
        study.find.get("sensitivity", {}),
        of=of,
        between=between or (),
        at=at,
        by=by,
        top=top,
        method=method,
        samples=samples,
        seed=seed,
    )
    with Progress(lines_only=json) as shown:
        found = find_sensitivity(chosen(study.points(), question.at), question, study.baseline, shown.line)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
