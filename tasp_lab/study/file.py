"""Studies as TOML files, or as the same in Python."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasp_lab.core.errors import StudyError, of_type, unknown
from tasp_lab.machines.sampling import Sampling
from tasp_lab.planning.plan import ANY
from tasp_lab.schedules.files import beside
from tasp_lab.study.axis import axis_values
from tasp_lab.study.point import AS_IS, LAYER, OPTIONS, PLAN, SETTINGS
from tasp_lab.study.study import FILTERED, Axis, Section, Study, check_zipped, places
from tasp_lab.study.where import Where

SECTIONS = ("study", "machine", "layer", "plan", "schedule", "what-if", "where", "find")
_STUDY = ("name", "seed", "samples", "zip")
_FIND = ("crossover", "sensitivity")

OF_MODELS = ("model", "seq")
"""Axes of machines and layers in studies of plans."""

TEMPLATES = ("machine", "schedule")
"""Axes whose values may have other axes in braces."""


def load_study(given: str | Path | Mapping[str, Any]) -> Study:
    """The study of a TOML file, or of a mapping of the same form. Raises `StudyError`.

    >>> load_study({"machine": {"name": ["h100-8", "mi300x-8"]}, "layer": {"seq": "geom(8Ki, 64Ki, 2)"},
    ...             "schedule": {"name": ["tasp", "ulysses"]}}).count
    16
    """
    if isinstance(given, Mapping):
        return _study(given, "study")
    if not isinstance(given, str | Path):
        raise StudyError(of_type("study", given, "the name of a TOML file, or a mapping"))
    path = Path(given)
    document = read_document(path)
    try:
        return _study(_with_files(document, path.parent), path.stem)
    except StudyError as error:
        raise StudyError(f"{path}: {error}") from error


def read_document(path: Path) -> dict[str, Any]:
    """The document of a TOML file. Raises `StudyError`."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise StudyError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: invalid TOML: {error}") from error


def _with_files(document: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The document with the files of its schedules beside the study named as seen from the current folder."""

    def within(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: within(each) for name, each in value.items()}
        if isinstance(value, list):
            return [within(each) for each in value]
        return beside(value, folder) if isinstance(value, str) else value

    return {section: within(table) if section in ("schedule", "find") else table
            for section, table in document.items()}  # fmt: skip


def _study(document: Mapping[str, Any], name: str) -> Study:
    _known(document, "section", SECTIONS, "")
    sections = {section: _table(document.get(section, {}), section) for section in SECTIONS}
    of_study = _known(sections["study"], "name", _STUDY, "[study]: ")
    baseline = sections["schedule"].get("baseline")
    axes = _axes(sections, baseline)
    given = of_study.get("zip", [])
    is_group = isinstance(given, list | tuple) and given and all(isinstance(each, str) for each in given)
    groups = [given] if is_group else given
    if not isinstance(groups, list | tuple) or not all(isinstance(each, list | tuple) and each for each in groups):
        raise StudyError(f"zip: {given!r}, expected lists of names such as [['nodes', 'seq']]")
    zipped = tuple(tuple(map(str, group)) for group in groups)
    check_zipped(axes, zipped)
    where = Where.parse(sections["where"])
    where.check({*(axis.name for axis in axes), *FILTERED})
    sampling = Sampling(of_study.get("samples", 0), of_study.get("seed", 0))
    if sections["plan"]:
        unused = {"[find]": sections["find"], "[schedule] baseline": baseline, "[study] samples": sampling.samples}
        for place, value in unused.items():
            if value:
                raise StudyError(f"{place} in a study of plans, expected none")
    schedules = next(axis.values for axis in axes if axis.name == "schedule")
    if baseline is not None and baseline not in schedules:
        raise StudyError(f"[schedule] baseline: {unknown('schedule', str(baseline), map(str, schedules))}")
    return Study(
        str(of_study.get("name", name)),
        axes,
        sampling,
        zipped,
        ((AS_IS, ()), *_variants(sections["what-if"])),
        where,
        baseline,
        _known(sections["find"], "name", _FIND, "[find]: "),
        document,
    )


def _table(given: object, section: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise StudyError(f"[{section}]: {given!r}, expected a table")
    return given


def _known(table: Mapping[str, Any], what: str, names: Iterable[str], place: str) -> Mapping[str, Any]:
    for name in table:
        if name not in names:
            raise StudyError(f"{place}{unknown(what, name, names)}")
    return table


def _axes(sections: Mapping[str, Mapping[str, Any]], baseline: object) -> tuple[Axis, ...]:
    """The axes of machines, layers, plans and schedules. Raises `StudyError` for unknown and missing ones."""
    plans = bool(sections["plan"])
    known: Mapping[Section, tuple[str, ...]] = (
        {"machine": SETTINGS, "layer": OF_MODELS, "plan": PLAN, "schedule": ("name",)}
        if plans
        else {"machine": SETTINGS, "layer": LAYER, "schedule": OPTIONS}
    )
    found = list[Axis]()
    for section in known:
        for name, given in sections[section].items():
            if (section, name) != ("schedule", "baseline"):
                label = section if name == "name" and section != "layer" else name
                found.append(Axis(label, section, axis_values(label, given)))
    if plans and "name" not in sections["schedule"]:
        found.append(Axis("schedule", "schedule", (ANY,)))
    names = [axis.name for axis in found]
    length = "cached_keys" if "decode" in names else "seq"
    needed = {"machine": "machine", length: "layer", "schedule": "schedule"}
    needed |= {"model": "layer", "batch_tokens": "plan"} if plans else {}
    for name, place in needed.items():
        if name not in names:
            raise StudyError(f"[{place}]: no {'name' if name == place else name}, expected one or a list of them")
    used = {name for axis in found if axis.name in TEMPLATES for text in axis.values for name in places(text)}
    for axis in found:
        if names.count(axis.name) > 1:
            raise StudyError(f"axis {axis.name!r} is in two sections, expected it in one")
        if axis.name in TEMPLATES or axis.name in known[axis.section]:
            continue
        is_fixed = axis.section in ("layer", "plan")  # these have no names in braces
        if is_fixed or axis.name not in used:
            where = "" if is_fixed else ", or a name in braces in the name of a machine or schedule"
            raise StudyError(f"[{axis.section}]: {unknown('name', axis.name, known[axis.section])}{where}")
    if missing := sorted(used - set(names)):
        raise StudyError(f"{{{missing[0]}}} in a name: no such axis, expected one of {', '.join(names)}")
    # A screened run simulates the first schedule of each layer, and the baseline is to have a time.
    return tuple(
        replace(axis, values=tuple(sorted(axis.values, key=lambda value: value != baseline)))
        if axis.name == "schedule"
        else axis
        for axis in found
    )


def _variants(section: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Names of variants and their overrides."""
    found = []
    for name, given in section.items():
        table = _known(_table(given, f"what-if.{name}"), "name", ("set",), f"[what-if.{name}]: ")
        changes = _table(table.get("set", {}), f"what-if.{name}.set")
        if not changes or name == AS_IS:
            raise StudyError(f"[what-if.{name}]: expected set = {{ NAME = VALUE }}, and a name other than {AS_IS!r}")
        found.append((name, tuple(f"{what}={value}" for what, value in changes.items())))
    return found
