"""The commands of ``tasp-lab``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter

from tasp_lab.catalogue import catalogue_names, is_expression, load_machine, topology_document, with_library
from tasp_lab.changes import with_links, without_links
from tasp_lab.cli import report
from tasp_lab.cli.calibrate import calibrate
from tasp_lab.cli.doctor import examine, print_examination
from tasp_lab.cli.layer_options import USUAL_LAYER, LayerChoice, whole_number
from tasp_lab.cli.options import FabricKind, Json
from tasp_lab.cli.profiles import profile_app
from tasp_lab.collectives import kind_of
from tasp_lab.errors import OutputError, QuantityError, TaspLabError
from tasp_lab.expressions import expression_defaults
from tasp_lab.machine import Compute, Machine
from tasp_lab.output import check_writable, write_whole
from tasp_lab.quantities import format_bandwidth, format_time, parse_time_s
from tasp_lab.schedules import USES_RINGS, Work, check_names
from tasp_lab.timeline import Timeline
from tasp_lab.topology import Topology
from tasp_lab.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tasp_lab.decomposition import Decomposition

app = App(
    name="tasp-lab",
    help="What ring and multi-ring collectives cost on a machine: predicted, executed and compared.",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `main` says so itself
)

TopologyText = Annotated[
    str,
    Parameter(help="A machine of the catalogue, a topology file, or an expression: full-mesh:8, switch:8, ring:8, "
              "bidirectional-ring:8, torus:4x4, hypercube:3, circulant:8:1,-1, multipartite:3x2, nodes:2x8, "
              "nodes:2x8:switch, nodes:2x8:rails."),
]  # fmt: skip
Schedules = Annotated[
    list[str],
    Parameter(
        name="--schedule",
        negative=(),
        help="AllGather: ring, multi-ring, direct, trees. ReduceScatter: ring-reduce-scatter, "
        "multi-ring-reduce-scatter. AllReduce: ring-all-reduce, multi-ring-all-reduce. Others: all-to-all, send-recv. "
        "As one call of the library: library-ring, library-ring-reduce-scatter, library-ring-all-reduce. "
        "Attention: ring-attention, zigzag-ring-attention, striped-ring-attention, tasp. Repeatable.",
    ),
]
ShardBytes = Annotated[
    str | None,
    Parameter(
        help="A collective of which each rank owns so many bytes, like 64MiB; this or --seq. AllGather and "
        "ReduceScatter: a rank's shard; AllReduce: a message over the number of ranks; all-to-all: what goes from each "
        "rank to each; send-recv: a message."
    ),
]
Trace = Annotated[Path | None, Parameter(help="Write a Chrome trace (JSON) to this file; Perfetto opens it.")]
Plot = Annotated[Path | None, Parameter(help="Draw the timelines into this file (.png or .svg).")]


def _number(usual: str, text: str) -> Parameter:
    """A number of expressions; None when it is not given, so that giving it where it has no use can be refused."""
    return Parameter(help=text, show_default=lambda _: usual)


@Parameter(name="*")
@dataclass(frozen=True)
class LinkChanges:
    """Links that fail or are slower than others, on any topology."""

    without_link: Annotated[
        tuple[str, ...],
        Parameter(negative=(), help="Leave a link out: 0-3 is both directions, 0>3 one; repeatable."),
    ] = ()
    link: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Give a link another bandwidth, like 0-3=10GB/s; repeatable.")
    ] = ()

    def apply(self, machine: Machine) -> Machine:
        """The machine with these links changed."""
        changed = with_links(without_links(machine.topology, self.without_link), self.link)
        return replace(machine, topology=changed)


@Parameter(name="*")
@dataclass(frozen=True)
class RingChoice:
    """Which rings are sought, and for how long."""

    fold: Annotated[
        int | None,
        Parameter(converter=whole_number, help="How many rings may use a pair of ranks, 1 or 2; else the fewest."),
    ] = None
    lanes: Annotated[int | None, Parameter(converter=whole_number, help="At most so many rings, the best ones.")] = None
    rail_aligned: Annotated[
        bool | None, Parameter(help="Hops between nodes join equal local ranks; where that is possible, if not given.")
    ] = None
    time_limit: Annotated[str, Parameter(help="For a search, where no rings are known.")] = "30s"

    def find(self, topology: Topology) -> Decomposition:
        """The rings of a topology."""
        from tasp_lab.decomposition import decompose

        return decompose(
            topology,
            self.fold,
            lanes=self.lanes,
            rail_aligned=self.rail_aligned,
            time_limit_s=parse_time_s(self.time_limit),
            say=report.say,
        )

    def find_for(self, topology: Topology, schedules: Sequence[str]) -> Decomposition | None:
        """The rings that the schedules need, if any; a choice that none needs is refused."""
        if any(name in USES_RINGS for name in schedules):
            return self.find(topology)
        if self != _USUAL_RINGS:
            names = f"{', '.join(USES_RINGS[:-1])} and {USES_RINGS[-1]}"
            raise QuantityError(f"--fold, --lanes, --rail-aligned and --time-limit apply to {names} only")
        return None


_USUAL_RINGS = RingChoice()
_AS_IT_IS = LinkChanges()


@Parameter(name="*")
@dataclass(frozen=True)
class ExpressionNumbers:
    """The numbers of topology expressions; catalogue machines and files have their own."""

    link_bandwidth: Annotated[
        str | None, _number("50GB/s", "Of every link in an expression, or of its switch ports.")
    ] = None
    link_latency: Annotated[str | None, _number("1us", "From rank to rank over links.")] = None
    nic_bandwidth: Annotated[str | None, _number("50GB/s", "Of every NIC in an expression.")] = None
    nic_latency: Annotated[str | None, _number("5us", "From rank to rank over NICs.")] = None

    @property
    def given(self) -> dict[str, str]:
        return {name: text for name, text in vars(self).items() if text is not None}

    def load(self, text: str) -> Machine:
        """The wires of the machine that a text means, with these numbers, which only expressions take."""
        machine = load_machine(text, expression_defaults(self.given))
        if self.given and not is_expression(text):
            raise QuantityError(f"{text} has its own numbers; {_options_apply(list(self.given))} to expressions only")
        return machine


def _options_apply(names: Sequence[str]) -> str:
    options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{options} {'apply' if len(names) > 1 else 'applies'}"


_USUAL_NUMBERS = ExpressionNumbers()


topologies_app = App(name="topologies")
app.command(topologies_app)


@topologies_app.default
def topologies(
    name: str | None = None,
    /,
    *,
    numbers: ExpressionNumbers = _USUAL_NUMBERS,
    changes: LinkChanges = _AS_IT_IS,
    json: Json = False,
) -> None:
    """List the machines of the catalogue, or show one topology with its links and the source of each constant.

    What `--json` prints for one topology is itself a topology file.

    Example: tasp-lab topologies h100-8
    """
    if name is None:
        if numbers.given:
            raise QuantityError(f"{_options_apply(list(numbers.given))} to expressions only")
        if changes != _AS_IT_IS:
            raise QuantityError("--without-link and --link apply to one topology only")
        machines = [(each, load_machine(each)) for each in catalogue_names()]
        if json:
            report.print_json({"topologies": [
                {"name": each, "world_size": m.topology.world_size, "summary": m.summary} for each, m in machines
            ]})  # fmt: skip
            return
        rows = [(each, str(m.topology.world_size), m.summary) for each, m in machines]
        report.print_table("machines", ("name", "ranks", "summary"), rows, texts=(0, 2))
        return
    _show_machine(changes.apply(numbers.load(name)), json)


def _show_machine(machine: Machine, json: bool) -> None:
    if json:
        report.print_json(topology_document(machine))
    else:
        _print_machine(machine)


@topologies_app.command(name="import")
def import_file(
    file: Path,
    /,
    *,
    link_bandwidth: Annotated[str | None, Parameter(help="Of one NVLink or xGMI link, one way.")] = None,
    pcie_bandwidth: Annotated[str | None, Parameter(help="Of one PCIe link, one way.")] = None,
    cpu_bandwidth: Annotated[str | None, Parameter(help="Between two NUMA nodes, one way.")] = None,
    nvswitch: Annotated[bool | None, Parameter(help="Whether NVLinks lead to switches; decided if not given.")] = None,
    pcie: Annotated[bool | None, Parameter(help="Whether to include PCIe; where it is needed, if not given.")] = None,
    json: Json = False,
) -> None:
    """Make a topology of what a machine prints: nvidia-smi topo -m, rocm-smi --showtopo, or NCCL_TOPO_DUMP_FILE.

    What `--json` prints is a topology file.

    Example: nvidia-smi topo -m > topo.txt; tasp-lab topologies import topo.txt --json > machine.json
    """
    from tasp_lab.imports import read_topology

    machine = read_topology(
        file,
        link_bandwidth=link_bandwidth,
        pcie_bandwidth=pcie_bandwidth,
        cpu_bandwidth=cpu_bandwidth,
        nvswitch=nvswitch,
        pcie=pcie,
    )
    _show_machine(machine, json)


def _print_machine(machine: Machine) -> None:
    topology = machine.topology
    if machine.summary:
        print(machine.summary)
    kinds: dict[tuple[str, str, str], int] = {}
    for link in topology.listed_links():
        ends = (
            "rank to rank"
            if isinstance(link.source, int) and isinstance(link.destination, int)
            else "to or from a switch"
        )
        key = (ends, format_bandwidth(link.bandwidth_bytes_per_s), format_time(link.latency_s))
        kinds[key] = kinds.get(key, 0) + 1
    rows = [(ends, str(count), bandwidth, latency) for (ends, bandwidth, latency), count in kinds.items()]
    report.print_table(
        f"{topology.name}: {topology.world_size} ranks", ("links", "count", "bandwidth", "latency"), rows
    )
    for constant in machine.constants:
        print(f"{constant.name} = {constant.value}\n    {constant.source}")


@app.command
def decompose(
    topology: TopologyText,
    /,
    *,
    numbers: ExpressionNumbers = _USUAL_NUMBERS,
    changes: LinkChanges = _AS_IT_IS,
    rings: RingChoice = _USUAL_RINGS,
    plot: Annotated[Path | None, Parameter(help="Draw the rings into this file (.png or .svg).")] = None,
    json: Json = False,
) -> None:
    """Decompose a topology into the rings that carry most together, and say how far they are from the bound.

    Example: tasp-lab decompose full-mesh:5 --without-link 0-3
    """
    machine = changes.apply(numbers.load(topology))
    _check_outputs(topology, None, plot)
    decomposition = rings.find(machine.topology)
    if plot is not None:
        from tasp_lab.ring_pictures import draw_decomposition

        _write_picture(draw_decomposition(decomposition, report.on_one_line(f"Rings of {machine.topology.name}")), plot)
    if json:
        report.print_json(report.decomposition_document(decomposition))
    else:
        report.print_decomposition(decomposition)


@app.command
def predict(
    topology: TopologyText,
    /,
    *,
    schedule: Schedules,
    shard_bytes: ShardBytes = None,
    layer: LayerChoice = USUAL_LAYER,
    numbers: ExpressionNumbers = _USUAL_NUMBERS,
    changes: LinkChanges = _AS_IT_IS,
    rings: RingChoice = _USUAL_RINGS,
    library: Annotated[
        str,
        Parameter(
            help="What the communication library adds to the wires: auto (that of the machine's profile, if it has "
            "one), ideal (nothing), nccl, rccl or gloo."
        ),
    ] = "auto",
    engine: Annotated[
        Literal["auto", "simpy", "array"],
        Parameter(help="simpy: event by event; array: the same times, for large worlds; auto: whichever is faster."),
    ] = "auto",
    trace: Trace = None,
    plot: Plot = None,
    explain: Annotated[
        bool, Parameter(negative=(), help="Say what the time went to, and for each transfer what bound it.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict how long a collective or an attention layer takes.

    Example: tasp-lab predict full-mesh:8 --schedule ring --schedule multi-ring --shard-bytes 64MiB

    Example: tasp-lab predict full-mesh:8 --schedule ring-attention --schedule tasp --seq 128Ki --kv-heads 8 --pass both
    """
    from tasp_lab.cli.prediction import predict as ask_simulator

    machine = with_library(topology, changes.apply(numbers.load(topology)), library)
    work, options = layer.work(shard_bytes), layer.options()
    if (rate := layer.predicted_flops_per_s()) is not None:
        machine = replace(machine, compute=Compute(rate))
    check_names(schedule, work)
    _check_outputs(topology, trace, plot)
    predictions = ask_simulator(
        machine,
        schedule,
        work,
        decomposition=rings.find_for(machine.topology, schedule),
        options=options,
        engine=engine,
        explain=explain,
        events=trace is not None or plot is not None,
        say=report.say,
    )
    timelines = [prediction.timeline for prediction in predictions if prediction.is_all]
    _write_timelines(timelines, trace, plot, f"{_kind(work, schedule)} on {topology}")
    if json:
        documents = [report.prediction_document(prediction) for prediction in predictions]
        if explain:
            for document, prediction in zip(documents, predictions, strict=True):
                report.explain(document, prediction, machine.topology)
        report.print_json({"library": machine.transport.name, "predictions": documents})
        return
    report.print_predictions(predictions, machine.transport.name)
    if explain:
        for prediction in predictions:
            if not prediction.is_sum:
                report.print_explanation(prediction.timeline, machine.topology)


@app.command
def validate(
    topology: TopologyText,
    /,
    *,
    schedule: Schedules,
    shard_bytes: ShardBytes = None,
    layer: LayerChoice = USUAL_LAYER,
    fabric: Annotated[
        FabricKind,
        Parameter(
            help="emulated: shaped links between network namespaces; local: plain processes; "
            "torchrun: this process is one of the ranks."
        ),
    ] = "emulated",
    scale: Annotated[
        float | None, Parameter(help="Bandwidth of the emulated fabric over the machine's; chosen when not given.")
    ] = None,
    repeat: Annotated[int, Parameter(converter=whole_number, help="Timed repetitions of each schedule.")] = 5,
    transport: Annotated[
        Literal["auto", "p2p", "batched", "all-to-all"], Parameter(help="How blocks are sent.")
    ] = "auto",
    numbers: ExpressionNumbers = _USUAL_NUMBERS,
    changes: LinkChanges = _AS_IT_IS,
    rings: RingChoice = _USUAL_RINGS,
    trace: Trace = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Run a collective or an attention layer on real processes and compare it with its prediction.

    Example: tasp-lab validate full-mesh:8 --schedule ring --schedule multi-ring --shard-bytes 1MiB

    Example: tasp-lab validate full-mesh:8 --schedule ring-attention --schedule tasp --seq 8192 --compute timed:2e9
    """
    from tasp_lab.cli.comparison import validate as run_and_compare

    machine = changes.apply(numbers.load(topology))
    work, options, compute = layer.work(shard_bytes), layer.options(), layer.rate_flops_per_s()
    check_names(schedule, work)
    _check_outputs(topology, trace, plot)
    comparison = run_and_compare(
        machine,
        schedule,
        work,
        decomposition=rings.find_for(machine.topology, schedule),
        options=options,
        compute=compute,
        fabric=fabric,
        scale=scale,
        repeats=repeat,
        transport=transport,
        say=report.say,
    )
    if not comparison.speaks:
        return
    shown = [run for run in comparison.runs if run.prediction.is_all]
    timelines = [line for run in shown for line in (run.prediction.timeline, run.measured_timeline)]
    _write_timelines(timelines, trace, plot, f"{_kind(work, schedule)} on {topology}: predicted and measured")
    if json:
        report.print_json(report.comparison_document(comparison))
    else:
        report.print_comparison(comparison)


@app.command
def accuracy(
    *paths: Path,
    plot: Annotated[
        Path | None, Parameter(help="Draw measured and predicted times into this file (.png, .svg).")
    ] = None,
    json: Json = False,
) -> None:
    """Set measured tables beside their predictions: those of tasp-lab, or those in files and folders.

    A table is a CSV with the columns size_B and time_us under header lines: # profile: h100-2x8, # collective:
    all_gather, # ranks: 16, # source: ... A table without them is listed with the reason.

    Example: tasp-lab accuracy my-cluster/
    """
    from tasp_lab.cli.accuracy import account

    _check_outputs("", None, plot)
    tables = account(paths)
    if plot is not None:
        from tasp_lab.accuracy_pictures import draw_tables

        drawn = [table for table in tables if table.rows]
        if not drawn:
            raise OutputError(f"cannot draw {plot}: there is no table to compare")
        _write_picture(draw_tables(drawn), plot)
    if json:
        report.print_json(report.accuracy_document(tables))
    else:
        report.print_accuracy(tables)


app.command(calibrate)
app.command(profile_app)


@app.command
def doctor(*, json: Json = False) -> None:
    """Say what is installed, what this machine can do, and where the packages come from.

    Example: tasp-lab doctor
    """
    examination = examine()
    if json:
        report.print_json(examination)
    else:
        print_examination(examination)


def _kind(work: Work, schedules: Sequence[str]) -> str:
    return "Attention" if isinstance(work, Workload) else kind_of(schedules)


def _check_outputs(topology: str, trace: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written before anything takes time."""
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise OutputError(f"cannot write {plot}: expected a name that ends in .png or .svg")
    outputs = {option: path for option, path in (("--trace", trace), ("--plot", plot)) if path is not None}
    targets = {option: os.path.realpath(path) for option, path in outputs.items()}
    if len(set(targets.values())) < len(targets):
        raise OutputError(f"cannot write {plot}: --trace and --plot name the same file")
    for option, path in outputs.items():
        if os.path.isfile(topology) and targets[option] == os.path.realpath(topology):
            raise OutputError(f"cannot write {path}: {option} would replace the topology")
        check_writable(path)


def _write_timelines(timelines: list[Timeline], trace: Path | None, plot: Path | None, title: str) -> None:
    if trace is not None:
        from tasp_lab.trace import chrome_trace

        write_whole(trace, chrome_trace(timelines))
        report.say(f"trace: {trace}")
    if plot is not None:
        from tasp_lab.pictures import draw_timelines

        _write_picture(draw_timelines(timelines, report.on_one_line(title)), plot)


def _write_picture(figure: Figure, path: Path) -> None:
    from tasp_lab.pictures import render

    write_whole(path, render(figure, path.suffix.lower().removeprefix(".")))
    report.say(f"picture: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit 0 when all is well, 2 with one line when it is not, 130 after Ctrl-C.

    The arguments are those of this process, if none are given.
    """
    _prepare_streams()
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except (TaspLabError, CycloptsError) as error:
        _leave(2, str(error))
    except BrokenPipeError:
        _leave(1)
    except OSError as error:
        reason = error.strerror or str(error)
        _leave(2, reason if error.filename is None else f"{error.filename}: {reason}")
    except MemoryError:
        _leave(2, "not enough memory")
    except KeyboardInterrupt:
        _leave(130, "interrupted")


def _prepare_streams() -> None:
    """Print to nowhere where a stream is closed, and a replacement for what the encoding of stdout lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _leave(code: int, message: str = "") -> NoReturn:
    """Exit with a message on one line. What a stream still holds and cannot write is dropped, not tried once more."""
    with contextlib.suppress(OSError):
        if message:
            print(f"tasp-lab: {report.on_one_line(message)}", file=sys.stderr)
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, io.StringIO())
    sys.exit(code)
