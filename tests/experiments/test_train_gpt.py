"""Training a small GPT on real processes: whatever the ranks and the schedule, the losses are those of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import runtime
from experiments.train_gpt.__main__ import main
from experiments.train_gpt.attention import TimedAttention
from experiments.train_gpt.model import GPT
from experiments.train_gpt.options import Recipe, RunOptions
from experiments.train_gpt.start import FILE
from experiments.train_gpt.train import train
from tasp_lab.core.errors import TaspLabError
from tasp_lab.workload.sequence_layout import contiguous, zigzag
from tests.support.ranks import ROOT, as_if_by_torchrun, on_ranks
from tests.support.selection import covering, fifth
from tests.support.signals import hear_interrupts
from tests.support.systems import schedules_for

pytestmark = pytest.mark.distributed

RECIPE = Recipe("SS", heads=4, kv_heads=2, head_dim=8, seq=61, batch=2, seed=3)
"""61 positions: no number of ranks divides them."""

IMPORTED_BY_RANKS = ("torch._dynamo",)
"""By the first step of an optimizer."""

STEPS = 30
LARGEST_ERROR = 1e-5
"""Of a loss, relative; float32 has 6e-8."""


def losses(runs: list[tuple[Recipe, RunOptions]]) -> list[list[float]]:
    """On a rank: the losses of one run after the other."""
    return [[step.loss for step in train(recipe, run)] for recipe, run in runs]


def on(world_size: int, *ways: RunOptions, recipe: Recipe = RECIPE) -> list[list[float]]:
    """The losses of runs on so many ranks; every rank has the same."""
    found: Any = on_ranks(losses, world_size, [(recipe, run) for run in ways])
    assert all(isinstance(each, list) for each in found), found
    assert all(each == found[0] for each in found)
    return found[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the checkpoint after the last step of one process."""
    return tmp_path_factory.mktemp("saved")


def losses_by_torch(recipe: Recipe, run: RunOptions) -> list[float]:
    """On the only rank: the losses with torch's own attention."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    runtime.attention = attend  # type: ignore[assignment]
    return [step.loss for step in train(recipe, run)]


@pytest.fixture(scope="module")
def alone(saved: Path) -> list[float]:
    """The losses of one process that does without this project's attention."""
    (found,) = on_ranks(losses_by_torch, 1, RECIPE, RunOptions(STEPS, save=saved))
    assert isinstance(found, list), found
    return found


def test_one_process_learns(alone: list[float]) -> None:
    assert alone[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)  # it knows nothing of 256 bytes
    assert sum(alone[-5:]) < sum(alone[:5]) - 2


@pytest.mark.parametrize(("world_size", "steps"), [(1, fifth(10)), (4, fifth(STEPS)), (8, fifth(5))])
def test_the_losses_are_those_of_one_process(world_size: int, steps: int, alone: list[float]) -> None:
    names = schedules_for(RECIPE.layer("S", 1), world_size)
    if world_size > 1:
        every = ((ranks, name) for ranks in (4, 8) for name in schedules_for(RECIPE.layer("S", 1), ranks))
        names = [name for ranks, name in covering(every) if ranks == world_size]
    for name, found in zip(names, on(world_size, *(RunOptions(steps, name) for name in names)), strict=True):
        assert found == pytest.approx(alone[:steps], rel=LARGEST_ERROR), name


def test_the_losses_do_not_depend_on_the_mesh_and_on_kept_activations(alone: list[float]) -> None:
    two_by_two = RunOptions(STEPS, sequence_parallel=2)
    kept, computed_again = on(4, two_by_two, replace(two_by_two, steps=5, checkpoint_activations=True))
    assert kept == pytest.approx(alone, rel=LARGEST_ERROR)
    assert computed_again == kept[:5]


def test_bf16_learns_the_same_within_its_precision(alone: list[float]) -> None:
    """Of 8 bits; all ranks have the same losses (see `on`)."""
    (found,) = on(2, RunOptions(5), recipe=replace(RECIPE, dtype="bf16"))
    assert found == pytest.approx(alone[:5], rel=2**-8)


def test_a_run_that_is_resumed_goes_on(tmp_path: Path, alone: list[float]) -> None:
    """The same way: exactly the same losses. Other ranks and another schedule: within rounding."""
    folder = tmp_path / "made" / "too"
    first, then = RunOptions(6, save=folder, save_every=4), RunOptions(12, resume=folder)
    whole, before, after = on(4, RunOptions(12), first, then)
    assert before + after == whole
    (found,) = on(3, replace(then, steps=20, schedule="ring-attention"))
    assert found == pytest.approx(alone[6:20], rel=LARGEST_ERROR)


def refusals(cases: list[tuple[Recipe, RunOptions, RunOptions]]) -> list[str]:
    """On a rank: what it raises at each recipe, which rank 1 goes about another way."""
    found = []
    for recipe, run, odd in cases:
        try:
            train(recipe, odd if dist.get_rank() == 1 else run)
        except TaspLabError as error:
            found.append(str(error))
    return found


def test_what_cannot_work_is_refused_by_all_ranks(alone: list[float], saved: Path, tmp_path: Path) -> None:
    """In one line, before anything is computed; so one run after the other can be."""
    cut, empty, other, file = (tmp_path / name for name in ("cut", "empty", "other", "file"))
    whole = (saved / FILE).read_bytes()
    for folder, content in ((cut, whole[: len(whole) // 2]), (empty, b"")):
        folder.mkdir()
        (folder / FILE).write_bytes(content)
    other.mkdir()
    torch.save({"model": 1}, other / FILE)
    file.touch()
    cases = [
        (RECIPE, RunOptions(schedule="ring"), "schedule 'ring' is an AllGather"),
        (RECIPE, RunOptions(sequence_parallel=4), "sequence parallel: 4, expected a divisor of the 3 ranks"),
        (RECIPE, RunOptions(sequence_parallel=0), "sequence parallel: 0, expected"),
        (RECIPE, RunOptions(sequence_parallel=1), "batch: 2, expected a multiple of the 3 groups"),
        (RECIPE, RunOptions(text=tmp_path), f"cannot read {tmp_path}: Is a directory"),
        (RECIPE, RunOptions(text=cut / FILE, resume=saved), "text is "),
        (RECIPE, RunOptions(save=file), f"cannot write {file}"),
        (RECIPE, RunOptions(resume=tmp_path), "No such file"),
        (RECIPE, RunOptions(resume=cut), "damaged"),
        (RECIPE, RunOptions(resume=empty), "damaged"),
        (RECIPE, RunOptions(resume=other), "not a checkpoint of this program"),
        (
            RECIPE,
            RunOptions(resume=saved, steps=STEPS),
            f"steps: {STEPS}, expected more than the {STEPS} of the checkpoint",
        ),
        (replace(RECIPE, layers="3"), RunOptions(resume=saved), "layers is SS, here it is SSS"),
        (replace(RECIPE, seq=10**6), RunOptions(), "seq: 1000000, expected less than"),
    ]
    differ = RECIPE, RunOptions(), RunOptions(schedule="ring-attention")
    found: Any = on_ranks(refusals, 3, [*((recipe, run, run) for recipe, run, _ in cases), differ])
    for rank in range(3):
        assert found[rank].pop() == "rank 1: schedule is ring-attention, on rank 0 it is tasp"
        for told, (_, _, expected) in zip(found[rank], cases, strict=True):
            assert expected in told
            assert "\n" not in told


class Slow(torch.autograd.Function):
    """The sum of its arguments' heads; takes one second forward and ten backward, on a clock of its own."""

    now_s = 0.0

    @staticmethod
    def forward(context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(k)
        Slow.now_s += 1
        return q + k.repeat_interleave(2, 2) + v.repeat_interleave(2, 2)

    @staticmethod
    def backward(context: Any, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (k,) = context.saved_tensors
        Slow.now_s += 10
        of_group = out.view(*k.shape[:3], 2, -1).sum(3)
        return out, of_group, of_group


class SlowMove(torch.autograd.Function):
    """Its argument; takes a hundred seconds forward and a thousand backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        Slow.now_s += 100
        return x.clone()

    @staticmethod
    def backward(context: Any, out: torch.Tensor) -> torch.Tensor:
        Slow.now_s += 1000
        return out


@pytest.mark.parametrize("again", [False, True])
def test_the_stopwatch_counts_both_ways_of_every_layer(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a forward pass that is made again; a re-layout is not."""
    for name in ("attention", "linear_attention"):
        monkeypatch.setattr(f"runtime.{name}", lambda q, k, v, **_: Slow.apply(q, k, v))
    monkeypatch.setattr("runtime.relayout", lambda x, *_: SlowMove.apply(x))
    monkeypatch.setattr("time.perf_counter", lambda: Slow.now_s)
    attend = TimedAttention({"S": "tasp", "L": "lasp"}, {"S": zigzag(5, 1), "L": contiguous(5, 1)}, None)
    model = GPT(replace(RECIPE, layers="SLL", decay="scalar"), attend, checkpoint_activations=again)
    model(torch.zeros(1, 5, dtype=torch.int64), {kind: torch.arange(5) for kind in "LS"}).sum().backward()
    assert attend.seconds == 3 * (12 if again else 11) + 1100
    assert attend.relayout_seconds == 1100


def torchrun(*program: str) -> list[str]:
    """The command line that starts two ranks of a program."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]


TINY = ("--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--seq", "32")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, env=ENVIRONMENT
    )  # fmt: skip


def test_under_torchrun_it_prints_one_object() -> None:
    done = run(*torchrun("-m", "experiments.train_gpt", *TINY, "--steps", "4", "--json"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["sequence_parallel"], found["data_parallel"], len(found["losses"])) == (2, 1, 4)
    assert 0 < found["gradient_sum_share"] + found["attention_share"] < 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--steps", "many"), "--steps: 'many', expected a whole number"),
        (("--steps", "0"), "steps: 0, expected 1 or more"),
        (("--head-dim", "7"), "head dim: 7, expected an even number"),
        (("--kv-heads", "3"), "4 heads are not a multiple of 3 KV heads"),
        (("--learning-rate", "nan"), "learning rate: nan, expected a finite number above 0"),
        (("--layers", "0"), "layers: 0, expected 1 or more"),
        (("--layers", "LLX"), "layers 'LLX': unknown layer 'X', expected L (linear) or S (softmax attention)"),
        (("--layers", "2x"), "layers '2x': no layers in part 1"),
        (("--layers", "SS", "--decay", "head"), "decay: head, expected none, as no layer is linear"),
        (("--layers", "LS", "--decay", "often"), "--decay"),
        (("--layers", "LS", "--linear-schedule", "tasp"), "schedule 'tasp' is for softmax attention, expected one for"),
        (("--layers", "LS", "--linear-schedule", "lasp-3"), "unknown schedule 'lasp-3'"),
        (("--layers", "LS", "--schedule", "lasp-2"), "schedule 'lasp-2' is for linear attention, expected one for"),
        (
            ("--layers", "L", "--linear-schedule", "ring-linear-attention", "--decay", "scalar"),
            "decay 'scalar' depends",
        ),
        (("--linear-schedule", "tasp"), "schedule 'tasp' is for softmax attention"),
        (("--colour", "red"), "Unknown option: --colour"),
    ],
)
def test_a_wrong_option_is_one_line(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(options)
    told = capsys.readouterr()
    assert (left.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    assert line.startswith("train_gpt: ")
    assert expected in line


def trained_until_rank_1_dies(output: Path) -> None:
    """On a rank: a training whose third call of attention kills rank 1; what rank 0 says is in files.

    No supervisor is there, which might end rank 0 before it has said anything.
    """
    if os.environ["RANK"] == "1":
        calls = iter(range(3))
        attend = TimedAttention.softmax

        def attend_twice(*arguments: Any) -> Any:
            return os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 2 else attend(*arguments)

        TimedAttention.softmax = attend_twice  # type: ignore[method-assign]
    else:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), descriptor)
    main([*TINY, "--steps", "9"])


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """In the middle of a step; the other one says whom it lost, and both are gone."""
    assert as_if_by_torchrun(trained_until_rank_1_dies, 2, tmp_path) == [2, -signal.SIGKILL]
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line.startswith("train_gpt: training step 3, attention: rank 0")
    assert "lost" in line
    assert (tmp_path / "stdout").read_text().count("step") == 2


@pytest.mark.parametrize("alone", [True, False])
def test_ctrl_c_ends_all_ranks(alone: bool) -> None:
    module = ("-m", "experiments.train_gpt", *TINY, "--steps", "1000000")
    line = [sys.executable, *module] if alone else torchrun(*module)
    process = subprocess.Popen(
        line, text=True, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT, preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    assert any(line.startswith("step 3 ") for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=20)
    lines = [line for line in told.splitlines() if line.startswith("train_gpt: ")]
    assert "train_gpt: interrupted" in lines
    if alone:
        assert (process.returncode, told) == (130, "train_gpt: interrupted\n")
