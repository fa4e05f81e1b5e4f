"""A question: one schedule for one collective or layer on one machine, and the machine on which it is answered.

>>> import tasp_lab
>>> time_s = tasp_lab.answer(tasp_lab.Question("mi300x-8", "ring", 2**26)).time_s
>>> time_s == tasp_lab.predict("mi300x-8", "ring", "64MiB")[0].time_s
True
>>> layer = tasp_lab.Workload(8192, heads=8, mask="causal")
>>> tasp_lab.answer(tasp_lab.Question("h100-8", "tasp", layer)).status
'ok'

`predict` asks one question per schedule, `compare` one for each schedule that may apply, a study one for each
combination of its axes. Equal questions have equal keys, and a file or a function that changes under the same name
gives another key: an answer follows from the inputs of the question, from all constants of its machine, from the
schedules that are built (`key_of`), and from the version of the engines and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, Literal

from tasp_lab.core.arguments import Argument, Option, arguments_of
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, TaspLabError
from tasp_lab.core.files import file_sha256
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.version import MODEL_VERSION
from tasp_lab.machines.compute import KernelCompute
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.inputs import MachineLike, WorkLike, as_work, chosen_machine, run_by_stack, with_assumptions
from tasp_lab.prediction.provenance import machine_content, plain, rings_inputs, sha256
from tasp_lab.prediction.settings import AS_IS, MachineSettings
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.rings.options import ANY_RINGS, RingOptions
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.build import AnySchedule, as_schedule, name_of
from tasp_lab.schedules.files import content_name
from tasp_lab.schedules.registry import ALL, uses_rings
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload, is_left_out

NO_SAMPLES = Sampling(0)

Engine = Literal["auto", "simpy", "array"]
"""See `sim.simulate.simulate`."""

Value = str | int | float | bool | None
"""A value of an axis of a study, or of a cell of a row."""

Rings = RingOptions | tuple[Decomposition, ...]
"""Which rings are sought, or the rings themselves."""


def chosen_rings(
    given: Annotated[
        Decomposition | Sequence[Decomposition] | None,
        Option(expected="a Decomposition, as tasp_lab.decompose returns it", error=NoDecompositionError),
    ],
    sought: RingOptions,
) -> Rings:
    """The given rings, if any, else which ones are sought. Raises `NoDecompositionError` for both."""
    rings = (given,) if isinstance(given, Decomposition) else tuple(given or ())
    if rings and sought != ANY_RINGS:
        raise NoDecompositionError("fold, lanes, rail-aligned and search-budget have no effect on given rings")
    return rings or sought


def are_sought(rings: Rings, schedules: Sequence[str]) -> bool:
    """Whether one of the schedules takes rings that have to be sought.

    Raises `NoDecompositionError` for options of a search that have no effect.
    """
    if any(map(uses_rings, schedules)):
        return isinstance(rings, RingOptions)
    if isinstance(rings, RingOptions) and rings != ANY_RINGS:
        *others, last = (name for name, spec in ALL.items() if spec.uses_rings)
        names = f"{', '.join(others)} and {last}"
        raise NoDecompositionError(f"fold, lanes, rail-aligned and search-budget apply to {names} only")
    return False


@dataclass(frozen=True)
class Question(MachineSettings):
    """One question: the machine with its settings, a schedule, the work, and how it is answered.

    Parameters
    ----------
    machine : a name, an expression or a file, as `tasp_lab.machines.catalogue.load_machine` takes it, or an object.
    schedule : a name of `tasp_lab.schedules.registry`, a builder that is registered there, a schedule that was built
        for this machine and work, or one for each requested pass.
    work : a layer, or the bytes per rank of a collective.
    options : of the schedule; its passes among them.
    sampling : of the constants, for the interval; no samples for an interval of residuals alone, None for no interval.
    rings : which rings schedules over rings may take, or the rings themselves; the fastest are taken.
    engine : of the simulator, see `sim.simulate.simulate`.
    labels : the values of a study's axes, by name, for tables. They are no inputs: equal questions have equal keys.
    """

    machine: MachineLike
    schedule: AnySchedule | tuple[Schedule, ...]
    work: Work
    options: Annotated[AttentionOptions, Option(expected="AttentionOptions", error=ScheduleError)] = DEFAULT_OPTIONS
    sampling: Sampling | None = NO_SAMPLES
    rings: Rings = ANY_RINGS
    engine: Engine = "auto"
    labels: tuple[tuple[str, Value], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, tuple):
            object.__setattr__(self, "schedule", as_schedule(self.schedule))

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return name_of(self.schedule[0] if isinstance(self.schedule, tuple) else self.schedule)

    @property
    def layer(self) -> Workload:
        """The work, which is a layer."""
        assert isinstance(self.work, Workload), "a question about a layer"
        return self.work

    def label(self, name: str, default: Value = None) -> Value:
        """The value of an axis, or `default`."""
        return dict(self.labels).get(name, default)

    def inputs(self) -> dict[str, object]:
        """What is asked, by name, ready for JSON; fields that only some questions have are left out elsewhere."""
        found: dict[str, object] = {
            "machine": self.machine if isinstance(self.machine, str) else _name(self.machine),
            "schedule": content_name(self.schedule) if isinstance(self.schedule, str) else _digest(self.schedule),
            "library": self.library,
            "kernel": self.kernel,
            "stack": self.stack,
            "contention": self.contention,
        }
        if isinstance(self.work, Workload):
            known = (each for each in fields(self.work) if not is_left_out(self.work, each))
            found["layer"] = {each.name: getattr(self.work, each.name) for each in known}
            found["options"] = {each.name: getattr(self.options, each.name) for each in fields(self.options)}
        else:
            found["shard_bytes"] = self.work
        found["overrides"] = list(self.overrides)
        found |= {} if self.sampling is None else {"samples": self.sampling.samples, "seed": self.sampling.seed}
        if isinstance(self.rings, tuple):
            found["rings"] = rings_inputs(self.rings)
        elif self.rings != ANY_RINGS:
            found["rings"] = plain(self.rings)
        for name in ("compute", "without"):
            if value := getattr(self, name):
                found[name] = list(value) if isinstance(value, tuple) else value
        return found | ({} if self.engine == type(self).engine else {"engine": self.engine})

    def key(self, constants: str | None = None, models: int = MODEL_VERSION) -> str:
        """The hash of the inputs, of the machine (`constants` is its hash) and of the version of engines and models.

        >>> question = Question("h100-8", "tasp", Workload(8192))
        >>> question.key() == Question("h100-8", "tasp", Workload(8192), labels=(("seq", 8192),)).key()
        True
        >>> question.key("", models=1) == question.key("", models=2)
        False
        """
        return sha256([self.inputs(), constants_of(self) if constants is None else constants, models])[:32]


SETTINGS: Mapping[str, Argument] = {
    **arguments_of(AttentionOptions, ScheduleError),
    **arguments_of(RingOptions),
    **arguments_of(MachineSettings),
    "options": arguments_of(Question)["options"],
    "sequence": arguments_of(as_work)["sequence"],
    "decomposition": arguments_of(chosen_rings)["given"],
    **arguments_of(Sampling),
}
"""What `predict` and `compare` take by keyword: the fields of a question, of its options and of its rings; the
positions of a layer of the model that the work names; and the rings of schedules over rings, of several the fastest
(by default those of `tasp_lab.prediction.ring_choice.ring_candidates`)."""

RUN_SETTINGS = {
    name: SETTINGS[name] for name in SETTINGS if name not in ("library", "contention", "stack", "samples", "seed")
}
"""What `validate` takes by keyword: a fabric has its own library, and is measured."""


def question_of(
    machine: MachineLike, work: WorkLike, settings: Mapping[str, Any], samples: int = 0, engine: Engine = "auto"
) -> Question:
    """The question that arguments of `predict`, `compare` or `validate` make, without its schedule.

    The work has the overrides of layers. `samples` are those of intervals if the `SETTINGS` give none. Raises
    `TaspLabError` for settings that contradict each other.
    """
    texts = ("overrides", "without")
    left: dict[str, Any] = {name: tuple(value) if name in texts else value for name, value in settings.items()}

    def taken(kind: type) -> dict[str, Any]:
        return {name: left.pop(name) for name in arguments_of(kind) if name in left}

    options = replace(left.pop("options", DEFAULT_OPTIONS), **taken(AttentionOptions))
    sought = RingOptions(**taken(RingOptions))
    sampling = Sampling(**{"samples": samples} | taken(Sampling))
    work = as_work(work, left.pop("sequence", None))
    if overrides := left.get("overrides", ()):
        from tasp_lab.machines.overrides import overridden_layer

        work = overridden_layer(work, overrides)
    return Question(
        machine,
        schedule="",
        work=work,
        options=options,
        sampling=sampling if sampling.samples else None,
        rings=chosen_rings(left.pop("decomposition", None), sought),
        engine=engine,
        **left,
    )


def key_of(question: str, schedules: str) -> str:
    """The key of an answer: of a question and the hash of the schedules that were built for it."""
    return sha256([question, schedules])[:32]


def _digest(schedule: Schedule | tuple[Schedule, ...]) -> str:
    return " ".join(each.digest for each in schedule) if isinstance(schedule, tuple) else schedule.digest


def _name(machine: Machine | Topology) -> str:
    return machine.topology.name if isinstance(machine, Machine) else machine.name


class PreparedMachine:
    """A machine as schedules run on it, with its rings and the samples of its constants, found once.

    `assumes` is whether the compute rates of linear layers are marked as assumed; not where the question gives a rate.
    """

    def __init__(
        self, machine: Machine, rings: Rings = ANY_RINGS, sampling: Sampling | None = None, assumes: bool = True
    ) -> None:
        self.machine, self.sampling, self._rings, self._assumes = machine, sampling, rings, assumes
        self._found: Sequence[Decomposition] | NoDecompositionError | None = None
        self._uncertainties: dict[object, Uncertainty] = {}

    def rings(self, progress: ProgressCallback = no_progress) -> Sequence[Decomposition]:
        """The rings that may be fastest. Raises `NoDecompositionError`; the search runs once in either case."""
        if isinstance(self._rings, tuple):
            return self._rings
        if self._found is None:
            from tasp_lab.prediction.ring_choice import ring_candidates  # most schedules need no rings

            find = partial(self._rings.find, progress=progress)
            try:
                self._found = tuple(ring_candidates(self.machine, find, with_known=self._rings.is_free))
            except NoDecompositionError as error:
                self._found = error  # kept, as a failed search takes as long as a successful one
        if isinstance(self._found, NoDecompositionError):
            raise self._found
        return self._found

    @property
    def search_complete(self) -> bool | None:
        """Whether the search for rings was; None where none was needed, or none exist."""
        found = self._rings if isinstance(self._rings, tuple) else self._found
        if not found or isinstance(found, NoDecompositionError):
            return None
        return all(each.search_complete for each in found)

    @cached_property
    def constants_sha256(self) -> str:
        """The hash of all of this machine that answers follow from."""
        return sha256(machine_content(self.machine))

    def machine_for(self, work: Work, schedule: str = "", passes: Pass = "forward") -> Machine:
        """The machine with the assumptions for this work, as its stack runs this schedule of it.

        Raises `ScheduleError` for a schedule that the stack does not run.
        """
        if not isinstance(work, Workload):
            return self.machine
        machine = run_by_stack(self.machine, work, schedule, passes)
        return with_assumptions(machine, work) if self._assumes else machine

    def uncertainty_for(self, work: Work, machine: Machine | None = None) -> Uncertainty | None:
        """What makes the intervals of times of this work on `machine_for` it; None where none are asked for."""
        if self.sampling is None:
            return None
        machine = machine or self.machine_for(work)
        # Machines for different kinds of layers differ in what is assumed, and so in what is sampled.
        kind = f"{work.kind}{'L' in work.layers}" if isinstance(work, Workload) else ""
        kernel = machine.compute.kernel if isinstance(machine.compute, KernelCompute) else None
        key = kind, machine.host.name, kernel
        if key not in self._uncertainties:
            self._uncertainties[key] = Uncertainty(machine, self.sampling)
        return self._uncertainties[key]


def with_machine(question: Question, machine: Machine) -> Question:
    """The question on a machine that has all the changes of the question already; overrides of the layer, too."""
    return replace(question, machine=machine, **vars(AS_IS) | {"compute": question.compute})


def prepared(question: Question) -> PreparedMachine:
    """The machine of a question; one given by name is prepared once per process. Raises `TaspLabError`."""
    if not isinstance(question.machine, str) or isinstance(question.rings, tuple):
        return prepare(question)
    # Questions that differ in their schedules and layers have the same machine.
    alike = replace(question, schedule="", work=0, options=DEFAULT_OPTIONS, engine="auto", labels=())
    files = file_sha256(question.machine), file_sha256(question.kernel), file_sha256(question.stack)
    return _prepared(alike, files)


@lru_cache(maxsize=64)
def _prepared(question: Question, files: tuple[str, ...]) -> PreparedMachine:
    """`files` are the hashes of the files that machine, kernel and stack name: an edited file is another machine."""
    return prepare(question)


def prepare(question: Question) -> PreparedMachine:
    """The machine of a question, prepared anew. Raises `TaspLabError`."""
    return PreparedMachine(
        chosen_machine(question.machine, question), question.rings, question.sampling, question.compute is None
    )


def constants_of(question: Question) -> str:
    """The hash of the machine of a question; empty for a machine that is refused."""
    try:
        return prepared(question).constants_sha256
    except TaspLabError:
        return ""
