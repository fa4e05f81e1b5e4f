"""`tasp-lab profile`: machines with their communication library, constant by constant."""

from __future__ import annotations

from cyclopts import App

from tasp_lab.cli import report
from tasp_lab.cli.options import Json
from tasp_lab.machine import Machine
from tasp_lab.profile import MEANINGS, Profile, find_profile, load_profile, profile_names

profile_app = App(name="profile", help="Machines with their communication library, constant by constant.")


@profile_app.command(name="list")
def list_profiles(*, json: Json = False) -> None:
    """List the families of machines that have a profile.

    Example: tasp-lab profile list
    """
    profiles = [load_profile(name) for name in profile_names()]
    if json:
        report.print_json({"profiles": [
            {"name": p.name, "summary": p.summary, "library": p.library, "ranks_per_node": p.ranks_per_node}
            for p in profiles
        ]})  # fmt: skip
        return
    rows = [(p.name, p.library, str(p.ranks_per_node), p.summary) for p in profiles]
    report.print_table("profiles", ("family", "library", "ranks per node", "summary"), rows, texts=(0, 1, 3))


@profile_app.command
def show(name: str, /, *, json: Json = False) -> None:
    """Show every constant of a machine's profile with its value, its meaning and where it comes from.

    A name is one of a family (h100), of a machine of it (h100-8, h100-10x8), or a profile file.

    Example: tasp-lab profile show h100-8
    """
    profile, machine = find_profile(name)
    if json:
        report.print_json(_document(profile, machine))
    else:
        _print(profile, machine)


def _document(profile: Profile, machine: Machine) -> report.Document:
    """A profile with every constant: its text, its value in SI units, its meaning and its source."""
    return {
        "profile": profile.name,
        "machine": machine.topology.name,
        "ranks": machine.topology.world_size,
        "summary": profile.summary,
        "library": profile.library,
        "constants": [
            {
                "name": constant.name,
                "text": constant.value,
                "value": MEANINGS[constant.name].parse(constant.value),
                "unit": MEANINGS[constant.name].unit,
                "meaning": MEANINGS[constant.name].text,
                "source": constant.source,
            }
            for constant in profile.constants
        ],
    }


def _print(profile: Profile, machine: Machine) -> None:
    """A profile for people."""
    print(f"{machine.topology.name}: {machine.topology.world_size} ranks. {profile.summary}")
    for constant in profile.constants:
        print(f"\n{constant.name} = {constant.value}    {MEANINGS[constant.name].text}\n    {constant.source}")
