"""The command line of the training example, as one rank started by torchrun or as a single process."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from json import dumps
from typing import Annotated

import torch
import torch.distributed as dist
from cyclopts import App, CycloptsError, Parameter

from experiments.train_gpt.options import Recipe, RunOptions
from experiments.train_gpt.train import LostRankError, Step, train
from runtime.ranks.torchrun import join
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import TaspLabError
from tasp_lab.core.process import at_once, leave, leaves_at_once
from tasp_lab.core.progress import on_one_line, print_line

WARM_UP = 2
"""Number of first steps that are excluded from timing."""

app = App(
    name="train_gpt",
    help="Train a small GPT on the bytes of a text, sequence-parallel.",
    version_flags=(),
    suppress_keyboard_interrupt=False,
)

_DEFAULT_RECIPE = Recipe()
_DEFAULT_RUN = RunOptions()


@app.default
def run(
    *,
    recipe: Recipe = _DEFAULT_RECIPE,
    run: RunOptions = _DEFAULT_RUN,
    backend: Annotated[
        BackendKind,
        Parameter(help="Under torchrun: nccl, gloo on CPUs, or auto, which is gloo only where the host has no GPUs."),
    ] = "auto",
    json: Annotated[
        bool, Parameter(negative=(), help="Print one JSON object at the end and nothing else on stdout.")
    ] = False,
) -> None:
    """Train. Only rank 0 prints.

    Examples:
    torchrun --nproc-per-node 4 -m experiments.train_gpt --schedule tasp --steps 50
    torchrun --nproc-per-node 4 -m experiments.train_gpt --layers LLLS --linear-schedule lasp-2 --decay scalar
    """

    def progress(step: Step) -> None:
        line = f"step {step.number}  loss {step.loss:.6f}  {recipe.tokens / step.step_s:.0f} tokens/s"
        print(line, file=sys.stderr if json else sys.stdout, flush=True)

    with process_group(backend):
        first = dist.get_rank() == 0
        steps = train(recipe, run, progress if first else lambda _: None)
        if json and first:
            print(dumps(document(recipe, run, steps), allow_nan=False))


def document(recipe: Recipe, run: RunOptions, steps: Sequence[Step]) -> dict[str, object]:
    """The document of ``--json``: times of rank 0 without the first steps; shares are relative to the step time."""
    groups, ranks = run.shape(recipe, dist.get_world_size())
    timed = steps[WARM_UP:] or steps
    total_s = sum(step.step_s for step in timed)
    return {
        "layers": recipe.layers,
        "schedule": run.schedule if "S" in recipe.layers else None,
        "linear_schedule": run.linear_schedule if "L" in recipe.layers else None,
        "sequence_parallel": ranks,
        "data_parallel": groups,
        "first_step": steps[0].number,
        "losses": [step.loss for step in steps],
        "tokens_per_s": recipe.tokens / statistics.median(step.step_s for step in timed),
        "attention_share": sum(step.attention_s for step in timed) / total_s,
        "relayout_share": sum(step.relayout_s for step in timed) / total_s,
        "gradient_sum_share": sum(step.gradient_sum_s for step in timed) / total_s,
    }


@contextlib.contextmanager
def process_group(backend: BackendKind) -> Iterator[None]:
    """The process group of torchrun, or a group of this process only."""
    if "RANK" in os.environ:
        with join(backend):
            yield
        return
    found = ("nccl" if torch.cuda.is_available() else "gloo") if backend == "auto" else backend
    dist.init_process_group(found, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; exit code 0 on success, 2 with one line on an error, 130 after Ctrl-C."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except LostRankError as error:  # each rank reports its own error
        _print_error(str(error))
        at_once()  # threads that wait for other ranks would block an orderly exit
        leave(2)
    except (TaspLabError, CycloptsError) as error:  # the same error on all ranks
        if first:
            _print_error(str(error))
        leave(2)
    except BrokenPipeError:  # the reader has closed the pipe
        os._exit(1)
    except Exception:
        if not leaves_at_once():
            raise
        traceback.print_exc()
        leave(1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun forwards the terminal's signal a second time
        if first:
            _print_error("interrupted")
        os._exit(130)


def _print_error(message: str) -> None:
    print_line(f"train_gpt: {on_one_line(message)}", sys.stderr)


if __name__ == "__main__":
    main()
