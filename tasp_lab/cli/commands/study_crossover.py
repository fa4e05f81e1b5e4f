"""``tasp-lab study crossover``: from which value of an axis on another schedule is faster."""

from __future__ import annotations

from tasp_lab.cli.console import Progress, print_json, print_parts
from tasp_lab.cli.options import DEFAULT_SAMPLES, Json, SamplingChoice
from tasp_lab.cli.options_find import Along, At, Between, From, Margin, StudyPath, To


def crossover(
    path: StudyPath,
    /,
    *,
    at: At = None,
    along: Along = None,
    between: Between = None,
    margin: Margin = None,
    from_: From = None,
    to: To = None,
    sampling: SamplingChoice = DEFAULT_SAMPLES,
    json: Json = False,
) -> None:
    """Find the values of an axis at which one of two schedules stops being faster than the other.

    Values of the study are tried first, then what lies between them is bisected. The interval is where it is not sure
    with 95 % which side of the crossover a value is on.

    Example: tasp-lab study crossover longctx.toml

    Example: tasp-lab study crossover longctx/ --at h100-8x8 --between tasp --between ulysses --margin 5%

    Example: tasp-lab study crossover longctx/ --along nic.bandwidth --from x0.25 --to x4
    """
    from tasp_lab.machines.sampling import FEW_SAMPLES, Sampling
    from tasp_lab.study.find.asked import asked, interval_of
    from tasp_lab.study.find.chosen import those_at
    from tasp_lab.study.find.crossover_question import crossover_question
    from tasp_lab.study.find.crossovers import find_crossovers

    given = asked(path)
    chosen = Sampling(FEW_SAMPLES.samples if sampling.samples is None else sampling.samples, sampling.seed)
    question = crossover_question(
        given.study.find.get("crossover", {}),
        along=along,
        between=between or (),
        margin=margin,
        start=from_,
        end=to,
        sampling=chosen,
    )
    with Progress(lines_only=json) as shown:
        points = those_at(given.study.points(), at or "")
        found = find_crossovers(points, question, given.evaluate, interval_of(chosen), shown.line)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
