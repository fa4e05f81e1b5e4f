"""The program: one of the ranks that torchrun started, or the only one."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import torch.distributed as dist
from cyclopts import App, CycloptsError, Parameter

from experiments.train_gpt.gradients import LostRankError
from experiments.train_gpt.options import Recipe, Way
from experiments.train_gpt.train import Step, train
from runtime.torchrun import join
from tasp_lab.cli.report import on_one_line, print_json
from tasp_lab.errors import TaspLabError

WARM_UP = 2
"""Steps at the beginning that no time is taken from."""

app = App(
    name="train_gpt",
    help="Train a small GPT on the bytes of a text, sequence-parallel.",
    version_flags=(),
    suppress_keyboard_interrupt=False,
)

_USUAL_RECIPE = Recipe()
_USUAL_WAY = Way()


@app.default
def run(
    *,
    recipe: Recipe = _USUAL_RECIPE,
    way: Way = _USUAL_WAY,
    json: Annotated[
        bool, Parameter(negative=(), help="Print one JSON object at the end and nothing else on stdout.")
    ] = False,
) -> None:
    """Train. Of all ranks, the first one prints.

    Example: torchrun --nproc-per-node 4 -m experiments.train_gpt --schedule tasp --steps 50
    """

    def say(step: Step) -> None:
        line = f"step {step.number}  loss {step.loss:.6f}  {recipe.tokens / step.step_s:.0f} tokens/s"
        print(line, file=sys.stderr if json else sys.stdout, flush=True)

    with process_group():
        first = dist.get_rank() == 0
        steps = train(recipe, way, say if first else lambda _: None)
        if json and first:
            print_json(document(recipe, way, steps))


def document(recipe: Recipe, way: Way, steps: Sequence[Step]) -> dict[str, object]:
    """What ``--json`` prints: times are rank 0's and leave the first steps out; shares are of the time of steps."""
    groups, ranks = way.shape(recipe, dist.get_world_size())
    timed = steps[WARM_UP:] or steps
    total_s = sum(step.step_s for step in timed)
    return {
        "schedule": way.schedule,
        "sequence_parallel": ranks,
        "data_parallel": groups,
        "first_step": steps[0].number,
        "losses": [step.loss for step in steps],
        "tokens_per_s": recipe.tokens / statistics.median(step.step_s for step in timed),
        "attention_share": sum(step.attention_s for step in timed) / total_s,
        "gradient_sum_share": sum(step.gradient_sum_s for step in timed) / total_s,
    }


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The process group that torchrun describes, or one of this process alone."""
    if "RANK" in os.environ:
        with join():
            yield
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit 0 when all is well, 2 with one line when it is not, 130 after Ctrl-C."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except LostRankError as error:  # every rank has its own view of what happened
        _tell(str(error))
        os._exit(2)  # at once: threads that still wait for other ranks would spoil an orderly exit
    except (TaspLabError, CycloptsError) as error:  # all ranks refuse the same
        if first:
            _tell(str(error))
        sys.exit(2)
    except BrokenPipeError:  # nobody reads any more
        os._exit(1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends the terminal's signal once more
        if first:
            _tell("interrupted")
        os._exit(130)


def _tell(message: str) -> None:
    print(f"train_gpt: {on_one_line(message)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
