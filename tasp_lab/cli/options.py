"""Options that several commands share, in the groups in which `--help` shows them.

Nothing heavy is imported here: `--help` and completion need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter, Token

from tasp_lab.core.arguments import arguments_of
from tasp_lab.core.choices import BackendKind, MatrixDtype
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import parse_integer
from tasp_lab.prediction.settings import MachineSettings
from tasp_lab.rings.options import RingOptions
from tasp_lab.schedules.collectives.kinds import KINDS, shard_help
from tasp_lab.schedules.registry import LINEAR, SchedulesOf, attention_names

if TYPE_CHECKING:
    from tasp_lab.machines.machine import Machine

WORK = Group("Work", sort_key=1)
LAYER = Group("Attention layer", help="With --seq or --documents.", sort_key=2)
PASSES = Group("Schedule options", help="Options of the schedules of an attention layer.", sort_key=3)
MACHINE = Group("Machine", sort_key=4)
RINGS = Group("Rings", help="The rings of schedules that use a decomposition, such as multi-ring and tasp.", sort_key=5)
RUN = Group("Run", sort_key=6)
OUTPUT = Group("Output", sort_key=7)

# ------------------------------------------------------------------------------------------------- kinds of options
#
# The help of an option of one command stands in the docstring of the command, that of shared ones beside them.


def of(group: Group, help: str = "", **others: Any) -> Parameter:
    """An option of a group."""
    others |= {"help": help} if help else {}  # None would hide the docstring
    return Parameter(group=group, **others)


def shown(group: Group, help: str = "") -> Parameter:
    """An option whose help states its default in words."""
    return of(group, help, show_default=False)


def flag(group: Group, help: str = "", **others: Any) -> Parameter:
    """An option without a negative form, and without a default in its help."""
    return of(group, help, negative=(), show_default=False, **others)


def quantity(group: Group, help: str = "", default: str | None = None) -> Parameter:
    """A number with a unit. A leading minus sign is part of it, so that the error names the number.

    `default` is shown for options whose own default is None, so that a useless one can be refused.
    """
    show = None if default is None else (lambda _: default)
    return of(group, help, allow_leading_hyphen=True, show_default=show)


def whole(group: Group, help: str = "") -> Parameter:
    """A whole number."""
    return of(group, help, converter=whole_number, allow_leading_hyphen=True)


def whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Convert the text of an option; an error of conversion is a `ValueError` for cyclopts."""
    try:
        return parse_integer(tokens[0].value)
    except QuantityError as error:
        raise ValueError(str(error)) from error


def plot(what: str) -> Parameter:
    """A picture."""
    return Parameter(help=f"Plot {what} to this file (.png, .svg or .pdf).", group=OUTPUT)


def options_class(
    name: str,
    owner: type,
    group: Group,
    types: Mapping[str, Any] | None = None,
    *,
    if_given: bool = False,
    names: Sequence[str] = (),
    groups: Mapping[str, Group] | None = None,
) -> type:
    """The fields of a dataclass, which have an `Option`, as options of the command line.

    Parameters
    ----------
    names : of the fields; by default all.
    types, groups : of some of them, where they are others here than those of the dataclass and `group`.
    if_given : whether options that are not given are None, so that a model can set them; then the help has the default
        of the field.
    """
    made, hints = list[tuple[str, Any, Any]](), get_type_hints(owner)
    for each in (each for each in fields(owner) if not names or each.name in names):
        argument = arguments_of(owner)[each.name]
        option, is_number = argument.option, Integral in argument.types and not argument.option.is_count
        kind = (types or {}).get(each.name, str if option.is_count else hints[each.name])
        default = f" Default: {each.default}." if if_given and each.default not in (MISSING, None, "", False) else ""
        shown = Parameter(
            name=f"--{option.flag}" if option.flag else None,
            help=option.help + default,
            group=(groups or {}).get(each.name, group),
            negative=() if each.default in (False, ()) else None,
            show_default=False if each.default == () else None,
            converter=whole_number if is_number else None,
            allow_leading_hyphen=is_number or option.is_count,  # a sign is part of a number, so errors name it whole
        )
        made.append(
            (each.name, Annotated[kind | None if if_given else kind, shown], None if if_given else each.default)
        )
    # cyclopts takes a class of the module `types` for one value
    found = make_dataclass(name, made, frozen=True, namespace={"__module__": __name__})
    return Parameter(name="*", group=group)(found)


# -------------------------------------------------------------------------------------------------------- questions


def schedules_help() -> str:
    """The names of all schedules, by what they do.

    >>> schedules_help().split(". ")[0]
    'AllGather: ring, multi-ring, direct, library-ring, trees'
    """
    of_kind = {kind: list(SchedulesOf(kind)) for kind in KINDS}
    layers = ("Attention", attention_names()), ("Linear attention", list(LINEAR))
    lines = [f"{kind}: {', '.join(names)}. " for kind, names in (*of_kind.items(), *layers)]
    lines.append("Hybrids: a linear and a softmax schedule, such as lasp-2+kv-all-gather. ")
    variants = "Variants such as usp:2x4:tasp: see docs/attention.md. Your own: mine.py:NAME. "
    return "".join(lines) + variants + "Repeatable."


TopologyText = Annotated[
    str,
    of(WORK, "A machine of the catalogue, a topology file, or an expression: full-mesh:8, switch:8, ring:8, torus:4x4, "
       "hypercube:3, nodes:2x8, nodes:2x8:rails, ..."),
]  # fmt: skip
Schedules = Annotated[list[str], flag(WORK, schedules_help(), name="--schedule")]
ShardBytes = Annotated[str | None, quantity(WORK, f"Size of a collective, such as 64MiB. {shard_help()}.")]

_TYPES = {"compute": str | None, "contention": Literal["on", "off"] | None}
_OF_LAYERS = dict.fromkeys(("compute", "kernel", "stack", "contention"), LAYER)
PARTS = ("overrides", "without")
FABRIC = ("compute", "kernel", "stack", "routes", *PARTS)

if TYPE_CHECKING:
    RingChoice = RingOptions
    MachineChoice = MachineSettings
    FabricChoice = MachineSettings
    PartChoice = MachineSettings
else:
    RingChoice = options_class("RingChoice", RingOptions, RINGS)
    MachineChoice = options_class("MachineChoice", MachineSettings, MACHINE, _TYPES, groups=_OF_LAYERS)
    FabricChoice = options_class("FabricChoice", MachineSettings, MACHINE, _TYPES, names=FABRIC, groups=_OF_LAYERS)
    PartChoice = options_class("PartChoice", MachineSettings, MACHINE, names=PARTS)
DEFAULT_RINGS, NO_CHANGES = RingChoice(), PartChoice()


def machine_settings(choice: MachineSettings) -> dict[str, Any]:
    """The settings of a machine as arguments of functions."""
    found = dict(vars(choice))
    if "contention" in found:
        found["contention"] = {None: None, "on": True, "off": False}[found["contention"]]
    return found


@Parameter(name="*", group=RUN)
@dataclass(frozen=True)
class SamplingChoice:
    """What intervals are made of.

    Args:
        samples: Samples of the parameters for intervals; 0 for no intervals. Default: 32; accuracy 8, compare none.
        seed: Seed of the samples; equal seeds give equal intervals.
    """

    samples: Annotated[int | None, whole(RUN)] = None
    seed: Annotated[int, whole(RUN)] = 0

    @property
    def given(self) -> dict[str, int]:
        """The arguments of `predict` and `compare`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@Parameter(name="*", group=MACHINE)
@dataclass(frozen=True)
class ExpressionNumbers:
    """The numbers of topology expressions; catalogue machines and files have their own.

    Args:
        link_bandwidth: Bandwidth of the links or switch ports of an expression.
        link_latency: Latency from rank to rank over links.
        nic_bandwidth: Bandwidth of the NICs of an expression.
        nic_latency: Latency from rank to rank over NICs.
    """

    link_bandwidth: Annotated[str | None, quantity(MACHINE, default="50GB/s")] = None
    link_latency: Annotated[str | None, quantity(MACHINE, default="1us")] = None
    nic_bandwidth: Annotated[str | None, quantity(MACHINE, default="50GB/s")] = None
    nic_latency: Annotated[str | None, quantity(MACHINE, default="5us")] = None

    @property
    def given(self) -> dict[str, str]:
        return {name: text for name, text in vars(self).items() if text is not None}

    def load(self, text: str, library: str) -> Machine:
        """The machine of a name, with a library and with these numbers, which only expressions accept."""
        from tasp_lab.machines.catalogue import is_expression, load_machine

        if not self.given:
            return load_machine(text, library=library)
        from tasp_lab.topology.expressions import expression_defaults

        machine = load_machine(text, expression_defaults(self.given), library=library)
        if not is_expression(text):
            raise QuantityError(f"{text} has its own numbers; {self.refusal()}")
        return machine

    def refusal(self) -> str:
        """The reason why the given numbers cannot be used."""
        options = ", ".join(f"--{name.replace('_', '-')}" for name in self.given)
        return f"{options} {'apply' if len(self.given) > 1 else 'applies'} to expressions only"


DEFAULT_SAMPLES, DEFAULT_NUMBERS, AS_IS = SamplingChoice(), ExpressionNumbers(), MachineChoice()


@Parameter(name="*")
@dataclass(frozen=True)
class StepMachine:
    """The machine of a whole step, and how fast it computes.

    Args:
        matrix_dtype: Dtype of matrix products; attention is in bf16.
        matrix_rate: Rate of matrix products, such as timed:600TFLOP/s. Default: that of the accelerator.
    """

    matrix_dtype: Annotated[MatrixDtype, of(LAYER)] = "bf16"
    matrix_rate: Annotated[str | None, shown(LAYER)] = None
    machine: MachineChoice = AS_IS
    numbers: ExpressionNumbers = DEFAULT_NUMBERS

    def settings(self, topology: str) -> dict[str, Any]:
        """The arguments of `predict_step` and `plan`, by keyword; `plan` changes a machine that is given by name."""
        given = {"matrix_dtype": self.matrix_dtype, "matrix_rate": self.matrix_rate, "machine": topology}
        given |= machine_settings(self.machine)
        if self.numbers == DEFAULT_NUMBERS:
            return given  # by name, so that a plan can ask for more nodes
        return given | {"machine": self.numbers.load(topology, self.machine.library), "library": "auto"}


DEFAULT_STEP_MACHINE = StepMachine()

# ------------------------------------------------------------------------------------------------- runs and outputs

Backend = Annotated[
    BackendKind,
    of(RUN, "With --fabric torchrun: nccl (RCCL on AMD) needs a GPU per rank, gloo runs on CPUs; auto: gloo only if "
       "neither this host nor the machine has GPUs."),
]  # fmt: skip
Scale = Annotated[
    float | None,
    of(RUN, "Bandwidth of the emulated fabric divided by the machine's. Default: what the cores can carry."),
]
Wide = Annotated[bool, flag(OUTPUT, "Show all columns, however wide the table is.")]
Sources = Annotated[bool, flag(OUTPUT, "Print sources in full; else one line of each.")]
Csv = Annotated[Path | None, of(OUTPUT, "Also write the rows to this CSV file.")]
Json = Annotated[bool, flag(OUTPUT, "Print one JSON object and nothing else on stdout.", name="--json")]
Trace = Annotated[Path | None, of(OUTPUT, "Write a Chrome trace (JSON) to this file; Perfetto opens it.")]
Plot = Annotated[Path | None, plot("the timelines")]
