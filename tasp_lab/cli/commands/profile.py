"""``tasp-lab profile``: machines with their communication library, constant by constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App

from tasp_lab.cli.console import Document, print_json, print_table
from tasp_lab.cli.options import Json

if TYPE_CHECKING:
    from tasp_lab.machines.machine import Machine
    from tasp_lab.machines.profile import Profile

profile = App(name="profile", sort_key=8, help="Machines with their communication library, constant by constant.")


@profile.command(name="list")
def list_profiles(*, json: Json = False) -> None:
    """List the system families that have a profile.

    Example: tasp-lab profile list
    """
    from tasp_lab.machines.profile import load_profile, profile_names

    profiles = [load_profile(name) for name in profile_names()]
    if json:
        print_json({"profiles": [
            {"name": p.name, "summary": p.summary, "library": p.library, "ranks_per_node": p.ranks_per_node}
            for p in profiles
        ]})  # fmt: skip
        return
    rows = [(p.name, p.library, str(p.ranks_per_node), p.summary) for p in profiles]
    print_table("profiles", ("family", "library", "ranks per node", "summary"), rows, texts=(0, 1, 3))


@profile.command
def show(name: str, /, *, json: Json = False) -> None:
    """Show every parameter of a machine with value, meaning and source.

    NAME is a family (h100), a machine (h100-8, h100-10x8), or a profile file.

    Example: tasp-lab profile show h100-8
    """
    from tasp_lab.machines.profile import find_profile

    found, machine = find_profile(name)
    if json:
        print_json(_document(found, machine))
    else:
        _print(found, machine)


def _document(profile: Profile, machine: Machine) -> Document:
    """A profile with every constant: its text, its value in SI units, its meaning and its source."""
    from tasp_lab.machines.constants import CONSTANTS
    from tasp_lab.machines.intervals import interval_fields

    return {
        "profile": profile.name,
        "machine": machine.topology.name,
        "ranks": machine.topology.world_size,
        "summary": profile.summary,
        "library": profile.library,
        "constants": [
            {
                "name": constant.name,
                "text": constant.text,
                "at": constant.at_text or None,
                "value": profile.parameters.numbers[constant.name],
                "unit": CONSTANTS[constant.name].unit,
                **interval_fields(constant, profile.parameters.numbers[constant.name]),
                "meaning": CONSTANTS[constant.name].meaning,
                "source": constant.source,
            }
            for constant in profile.parameters.values()
        ],
        "kernels": _kernels(machine),
    }


def _kernels(machine: Machine) -> list[Document]:
    """Every kernel of the accelerator, by pass and head dimension, with its constants; the default ones first."""
    from tasp_lab.machines.compute import kernel_constants, kernels_on

    return [
        {
            "name": kernel.name,
            "default": number == 0,
            "pass": variant.passing,
            "head_dim": variant.head_dim,
            "peak_flops_per_s": kernel.peak_rate(variant.passing, variant.head_dim),
            "assumed": kernel.assumption(variant.passing, variant.head_dim) or None,
            "constants": [
                {"name": each.name, "text": each.text, "source": each.source}
                for each in kernel_constants(kernel, variant.passing, variant.head_dim)
            ],
        }
        for number, kernel in enumerate(kernels_on(machine.accelerator))
        for variant in kernel.file.variants
    ]


def _print(profile: Profile, machine: Machine) -> None:
    """A profile for people."""
    from tasp_lab.machines.constants import CONSTANTS
    from tasp_lab.machines.intervals import interval_text

    print(f"{machine.topology.name}: {machine.topology.world_size} ranks. {profile.summary}")
    for constant in profile.parameters.values():
        at = "" if constant.at is None else f" at {constant.at_text}"
        value = f"{constant.text}{at}{interval_text(constant)}"
        print(f"\n{constant.name} = {value}    {CONSTANTS[constant.name].meaning}\n    {constant.source}")
    _print_kernels(machine)


def _print_kernels(machine: Machine) -> None:
    """The kernels, a line for each pass and head dimension; ``--json`` has all their constants."""
    from tasp_lab.core.units import format_flops, format_time
    from tasp_lab.machines.compute import kernels_on

    for number, kernel in enumerate(kernels_on(machine.accelerator)):
        print(f"\nkernel {kernel.name}{'' if number else ' (default)'}    attention by shape: tiles over the SMs")
        for variant in kernel.file.variants:
            assumed = kernel.assumption(variant.passing, variant.head_dim)
            peak, rate = kernel.peak_rate(variant.passing, variant.head_dim), variant.rate
            low, high = (format_flops(peak * end / rate.value) for end in (rate.low, rate.high))
            print(
                f"    {variant.passing}, head dimension {variant.head_dim}: up to "
                f"{format_flops(peak)} ({low} to {high}), tiles of "
                f"{variant.design.rows} x {variant.design.columns}, launch {format_time(variant.launch_s.value)}; "
                f"{assumed or variant.rate.source}"
            )
