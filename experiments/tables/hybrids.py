"""Training of pure softmax, pure linear and hybrid stacks: losses and times of steps, by schedule.

Four processes share the cores of this host and train the model of `experiments.train_gpt`, a small Linear-Llama3 as in
LASP-2 (arXiv:2502.07563): linear attention without decay, in the hybrid a layer of softmax attention after every three.
``python -m experiments.tables.hybrids`` writes ``experiments/results/hybrids.json`` after each part, and its tables
``.md``. It takes about fifteen minutes on two idle cores; ``--only PART``, several times, repeats some parts and keeps
the others.

No run can be faster than one process with all cores, whose times are in the table, too. They show what schedules cost
on a host, not how they scale: there are no links to wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from experiments.common import RESULTS, Formats, Record, markdown_table, read_record, table, write_record
from experiments.train_gpt.__main__ import WARM_UP
from experiments.train_gpt.options import Recipe, RunOptions
from tasp_lab.core.choices import Decay
from tasp_lab.core.files import write_whole
from tasp_lab.core.process import usable_cores
from tasp_lab.schedules.registry import LINEAR

RANKS = 4
STEPS, STEPS_OF_LOSSES = 8, 150
ROUNDS = {"alone": 3, "linear": 3, "softmax": 2, "losses": 1}
"""By part: every case is run so often, with all others in between; times are medians over rounds."""

SHOWN_STEPS = (1, 50, 100, 150)
SOFTMAX = ("kv-all-gather", "ring-attention", "zigzag-ring-attention", "tasp", "ulysses")
ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A run: its layers, the decay of linear ones, the schedules of both kinds, and how long it is."""

    layers: str
    decay: Decay = "none"
    linear: str = "lasp-2"
    softmax: str = "kv-all-gather"
    steps: int = STEPS
    seq: int = 4096
    batch: int = 1

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.layers, self.decay, kv_heads=4, seq=self.seq, batch=self.batch)

    @property
    def run(self) -> RunOptions:
        return RunOptions(self.steps, self.softmax, self.linear)


STACKS: Sequence[tuple[str, Decay]] = (
    ("SSSS", "none"), ("LLLL", "none"), ("LLLL", "scalar"), ("LLLS", "none"), ("LLLS", "scalar"),
)  # fmt: skip

PARTS: Mapping[str, Sequence[Case]] = {
    "alone": [Case(layers, decay) for layers, decay in STACKS],
    "linear": [
        *(Case("LLLL", linear=name) for name in LINEAR),
        *(Case("LLLL", decay) for decay in ("head", "scalar", "channel")),
    ],
    "softmax": [
        *(Case("SSSS", softmax=name) for name in SOFTMAX),
        *(Case("LLLS", linear=name) for name in LINEAR),
        *(Case("LLLS", softmax=name) for name in SOFTMAX[1:]),
        Case("LLLS", "scalar"),
    ],
    "losses": [Case(*stack, steps=STEPS_OF_LOSSES, seq=1024, batch=2) for stack in STACKS],
}
"""By name; ``alone`` runs on one process, ``softmax`` are all stacks with layers of softmax attention."""


def main(only: Iterable[str] = PARTS) -> None:
    """Train all parts, or these only, and write the record and its tables after each."""
    file = RESULTS / "hybrids.json"
    parts = read_record(file)["parts"] if file.exists() else {}
    for name in only:
        parts[name] = _on_ranks(name, 1 if name == "alone" else RANKS)
        write_record(file, {"parts": {each: parts[each] for each in PARTS if each in parts}})
        write_whole(RESULTS / "hybrids.md", text(read_record(file)).encode())


def _on_ranks(part: str, processes: int) -> list[Record]:
    """The documents of the runs of a part, on the same processes, with the medians of all rounds."""
    program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
    done = subprocess.run(
        [sys.executable, *program, "experiments.tables.hybrids", "--as-rank", part],
        cwd=ROOT, env=os.environ | threads, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    rounds: list[list[Record]] = json.loads(done.stdout)
    return [_summary(runs) for runs in zip(*rounds, strict=True)]


def _summary(runs: Sequence[Record]) -> Record:
    """One document of the runs of a case: medians of shares, and by round the times of a step and the losses."""
    names = [name for name in runs[0] if name.endswith("_share")]
    times_s = [run["tokens"] / run.pop("tokens_per_s") for run in runs]
    medians = {name: median(run[name] for run in runs) for name in names}
    return runs[0] | medians | {"step_s": times_s, "losses": [run["losses"] for run in runs]}


def _be_rank(part: str) -> None:
    """Run a part as one of its ranks."""
    import torch.distributed as dist

    from experiments.train_gpt.__main__ import document, process_group
    from experiments.train_gpt.train import train

    with process_group("auto"):
        found = [
            [
                {"decay": case.decay, "tokens": case.recipe.tokens}
                | document(case.recipe, case.run, train(case.recipe, case.run))
                for case in PARTS[part]
            ]
            for _ in range(ROUNDS[part])
        ]
        if dist.get_rank() == 0:
            print(json.dumps(found, allow_nan=False))


def text(record: Record) -> str:
    """The tables of a record."""
    parts: dict[str, list[Record]] = record["parts"]
    alone = {_stack(run): run for run in parts.get("alone", [])}
    cases = [run for name in PARTS if name not in ("alone", "losses") for run in parts.get(name, [])]
    recipe = Case("LLLS").recipe
    paragraphs = [
        f"Stacks of four layers of the training example ({recipe.heads} heads of {recipe.head_dim}, float32) on "
        f"{RANKS} processes of one host with {record['machine']['cores']} cores, made by "
        "`python -m experiments.tables.hybrids`. L is a layer of linear attention, S of softmax attention.",
        f"Steps of {recipe.tokens} tokens, one sequence. Every case is run two or three times, with others in between: "
        f"of the medians of {STEPS - WARM_UP} steps the median, the lowest and the highest. Shares are of the time of "
        "rank 0; that of attention includes re-layouts.",
        table([*alone.values(), *cases], columns(alone)),
    ]
    if cases:
        paragraphs.append(
            "The losses of a stack differ between schedules and rounds, one process included, by at most "
            f"{largest_difference([*alone.values(), *cases]):.1e} of their value."
        )
    if losses := parts.get("losses"):
        tokens = losses[0]["tokens"]
        paragraphs += [
            f"Losses of longer runs with `lasp-2` and `kv-all-gather`, of steps of {tokens} tokens in two sequences:",
            markdown_table(
                ("stack", *(f"step {step}" for step in SHOWN_STEPS)),
                [[_stack(run), *(f"{run['losses'][0][step - 1]:.3f}" for step in SHOWN_STEPS)] for run in losses],
            ),
        ]
    return "\n\n".join(paragraphs) + "\n"


def _stack(run: Record) -> str:
    return str(run["layers"]) + ("" if run["decay"] == "none" else f", decay {run['decay']}")


def columns(alone: Mapping[str, Record]) -> Formats:
    """What the table shows of a run, beside one process alone with the same stack."""
    return {
        "stack, schedules": lambda run: (
            f"{_stack(run)}: {_names(run) if run['sequence_parallel'] > 1 else 'one process'}"
        ),
        "step s": lambda run: f"{median(run['step_s']):.2f}",
        "rounds s": lambda run: f"{min(run['step_s']):.2f} to {max(run['step_s']):.2f}",
        "speed of one process": lambda run: (
            f"{median(alone[_stack(run)]['step_s']) / median(run['step_s']):.2f}" if _stack(run) in alone else ""
        ),
        "attention": "{attention_share:.0%}",
        "re-layouts": lambda run: f"{run['relayout_share']:.1%}" if run["relayout_share"] else "",
        f"loss of step {STEPS}": lambda run: f"{run['losses'][0][-1]:.4f}",
    }


def _names(run: Record) -> str:
    """The schedules of both kinds of layers."""
    return " + ".join(each for each in (run["linear_schedule"], run["schedule"]) if each)


def largest_difference(runs: Sequence[Record]) -> float:
    """The largest relative difference between losses of the same step of the same stack, in any round."""
    by_stack: dict[str, list[Sequence[float]]] = {}
    for run in runs:
        by_stack.setdefault(_stack(run), []).extend(run["losses"])
    return float(max(max(step) / min(step) - 1 for losses in by_stack.values() for step in zip(*losses, strict=True)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Train pure and hybrid stacks with every schedule.")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="train this part only; several times")
    parser.add_argument("--as-rank", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    if options.as_rank:
        _be_rank(options.as_rank)
    else:
        main(options.only or PARTS)
