"""The command line as a process: what it imports, Ctrl-C, errors for scripts, help and completion."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from inspect import signature
from pathlib import Path

import pytest

from tasp_lab.cli.commands.fabric import validate
from tasp_lab.cli.commands.predict import predict
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options_layer import LayerChoice, LayerFields
from tasp_lab.core.errors import QuantityError
from tasp_lab.prediction import predict as prediction
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.validation import validate as comparison
from tasp_lab.workload.layer import Workload
from tests.conftest import ROOT, Command
from tests.support.selection import fifth

PREDICT = ("predict", "full-mesh:4", "--schedule", "multi-ring", "--shard-bytes", "1MiB")
MANY_SMS = '\n[[constants]]\nname = "sms_per_channel"\nvalue = "200"\nsource = "mine"\n'
HEAVY = {"numpy", "scipy", "networkx", "matplotlib", "msgspec", "simpy", "torch", "ortools", "sim", "runtime"}
COMMANDS = ("topologies", "decompose", "predict", "validate", "accuracy", "calibrate", "profile", "doctor", "gpu-check")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("predict", "--help"), ("frobnicate",)], ids=str)
def test_nothing_heavy_is_imported_before_it_is_needed(arguments: tuple[str, ...]) -> None:
    program = """
import sys
from tasp_lab.cli import main
try:
    main()
except SystemExit:
    pass
print("modules:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""
    loaded = run(program, *arguments).stdout.splitlines()[-1].split()
    assert loaded[0] == "modules:"
    assert {"cyclopts", "tasp_lab"} <= set(loaded)
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize(
    "module",
    [
        "cyclopts", "attrs", "tasp_lab.cli.commands.predict", "tasp_lab.topology.graph", "numpy", "numpy._core",
        "sim.simulate", "msgspec", "matplotlib.figure", "matplotlib.backends.backend_svg",
    ],
)  # fmt: skip
def test_ctrl_c_while_something_is_imported_is_one_line(tmp_path: Path, module: str) -> None:
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever is inherited
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            print("pressed")
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from tasp_lab.cli import main
main()
"""
    done = run(program, *PREDICT, "--plot", str(tmp_path / "x.svg"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "pressed\n", "tasp-lab: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["numpy", "msgspec", "tasp_lab.topology.graph", "tasp_lab.cli.process"])
def test_ctrl_c_is_not_lost_where_an_import_swallows_exceptions(module: str) -> None:
    """As in callbacks of the import machinery, whose exceptions Python prints and forgets."""
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Press())
from tasp_lab.cli import main
main()
"""
    done = run(program, *PREDICT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tasp-lab: interrupted\n")


def test_a_second_ctrl_c_does_not_wait_for_an_import() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
            print("one", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("two", flush=True)
sys.meta_path.insert(0, Press())
from tasp_lab.cli import main
main()
"""
    done = run(program, *PREDICT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "one\n", "tasp-lab: interrupted\n")


@pytest.mark.parametrize("place", range(0, 480, 480 // fifth(12)))
def test_ctrl_c_at_any_import_is_one_line(place: int) -> None:
    """The places of all that a prediction imports, in their order: only Python's own start comes before."""
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Press:
    seen = 0
    def find_spec(self, name, path=None, target=None):
        if "tasp_lab.cli.interrupts" in sys.modules:
            self.seen += 1
            if self.seen == {place} + 2:
                os.kill(os.getpid(), signal.SIGINT)
press = Press()
sys.meta_path.insert(0, press)
from tasp_lab.cli import main
main()
print("imports:", press.seen)
"""
    done = run(program, *PREDICT)
    if done.returncode == 0:
        assert int(done.stdout.split("imports:")[1]) < place + 2
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "tasp-lab: interrupted\n")


@pytest.mark.parametrize("error", ["ImportError('initialization failed')", "SystemError('returned NULL')"])
def test_an_interrupt_that_a_library_makes_another_error_of_is_still_one(error: str) -> None:
    program = f"""
import os, signal, sys
from importlib import import_module
signal.signal(signal.SIGINT, signal.default_int_handler)
def load(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        raise {error} from None
import_module("tasp_lab.machines.catalogue").load_machine = load
import_module("tasp_lab.cli").main()
"""
    done = run(program, *PREDICT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tasp-lab: interrupted\n")


def test_a_defect_is_not_hidden() -> None:
    program = """
from importlib import import_module
def load(*_, **__): raise ZeroDivisionError("a defect")
import_module("tasp_lab.machines.catalogue").load_machine = load
import_module("tasp_lab.cli").main()
"""
    done = run(program, *PREDICT)
    assert done.returncode == 1
    assert "ZeroDivisionError: a defect" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "telling"),
    [
        ('["46GB/s", "48GB/s"]', '["48GB/s", "46GB/s"]', "interval 48GB/s to 46GB/s is empty, expected the lower end"),
        ('["46GB/s", "48GB/s"]', '["48GB/s", "49GB/s"]', "interval 48GB/s to 49GB/s does not hold the value 47GB/s"),
        ("", MANY_SMS, "contention: 32 channels take 6400 of 132 multiprocessors, expected fewer than all"),
    ],
)
def test_an_impossible_constant_of_a_profile(command: Command, old: str, new: str, telling: str) -> None:
    text = (files("tasp_lab.machines") / "profiles" / "h100.toml").read_text()
    assert old in text
    (command.folder / "x.toml").write_text(text.replace(old, new) if old else text + new)
    assert telling in command.refused("predict", "x.toml:8", "--schedule", "tasp", "--seq", "8Ki")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_have_the_format_that_their_name_asks_for(command: Command, ending: str) -> None:
    assert command(*PREDICT, "--plot", f"x.{ending}").returncode == 0
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (command.folder / f"x.{ending}").read_bytes().startswith(start)


def test_help_groups_options_and_shows_every_command(command: Command) -> None:
    overview = command("--help").stdout
    assert all(f"│ {name} " in overview for name in COMMANDS)
    shown = command("predict", "--help").stdout
    groups = ("Work", "Attention layer", "Schedule options", "Machine", "Rings", "Run", "Output")
    places = [shown.index(f"─ {group} ─") for group in groups]
    assert places == sorted(places)
    assert "─ Parameters ─" not in shown


@pytest.mark.parametrize("name", ["accuracy", "calibrate", "profile show", "topologies import"])
def test_other_commands_show_an_example_too(command: Command, name: str) -> None:
    assert f"tasp-lab {name}" in " ".join(command(*name.split(), "--help").stdout.split("Example: ", 1)[1].split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_in_the_home_folder(command: Command, shell: str) -> None:
    for name in ("ZSH", "ZSH_CUSTOM", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        command.environment.pop(name, None)
    command.environment["HOME"] = str(command.folder)
    done = command.process("--install-completion", "--shell", shell)
    assert done.returncode == 0, done.stderr
    scripts = [path for path in command.folder.rglob("*tasp-lab*") if path.is_file()]
    assert len(scripts) == 1
    text = scripts[0].read_text()
    assert all(word in text for word in (*COMMANDS, "shard-bytes"))


def test_options_have_the_defaults_of_the_functions_that_they_are_given_to() -> None:
    def defaults(function: Callable[..., object]) -> dict[str, object]:
        return {name: parameter.default for name, parameter in signature(function).parameters.items()}

    validated, shown = defaults(comparison.validate), defaults(validate)
    assert (shown["fabric"], shown["scale"], shown["repeat"], shown["transport"]) == tuple(
        validated[name] for name in ("fabric", "scale", "repeats", "transport")
    )
    assert defaults(predict)["engine"] == defaults(prediction.predict)["engine"]
    assert LayerChoice().options() == AttentionOptions()
    layer = LayerChoice(fields=LayerFields(sequence="64")).work(None)
    assert layer == Workload(sequence=64, mask="causal")


MANY_BLOCKS = ("predict", "full-mesh:128", "--schedule", "ulysses", "--seq", "16384", "--heads", "128")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited on Linux only")
@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("20MiB", "not enough memory: this takes more than 20MiB; set TASP_LAB_MEMORY to allow more, such as "
                  "TASP_LAB_MEMORY=32GiB"),
        ("much", "TASP_LAB_MEMORY: "),
    ],
)  # fmt: skip
def test_a_command_is_refused_the_memory_beyond_its_limit(command: Command, limit: str, told: str) -> None:
    command.environment |= {"TASP_LAB_MEMORY": limit}
    done = command.process(*MANY_BLOCKS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tasp-lab: {told}")
    assert len(done.stderr.splitlines()) == 1


def test_the_limit_of_memory_ends_with_its_command() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(QuantityError, match="not enough memory"), limited_memory():
        raise MemoryError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
