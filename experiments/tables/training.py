"""Attention and communication in a step of the training example on an emulated mesh, predicted and measured.

``python -m experiments.tables.training`` writes ``experiments/results/training.md`` and ``.json``. Every pair of ranks
has its own link. Measured attention times are compared with simulations on the point-to-point calibrated mesh, with
kernels at the rate measured without communication on all ranks at once. Communication is the attention time that
exceeds its kernel calls. Times on one host without links are in `experiments.tables.hybrids`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import RESULTS, Formats, read_record, table, write_page, write_record
from experiments.train_gpt.options import Recipe
from runtime.calibration import calibrate
from runtime.fabric.emulated import emulate
from runtime.protocol.jobs import KernelTimes, MeasureCompute, RankLocation, Ranks
from runtime.ranks.launcher import launch
from sim.event.engine import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.fabrics import default_scale

RECIPE = Recipe(seq=2048, batch=2)
WORLD_SIZES = (4, 8)
STEPS = 5
ROOT = Path(__file__).parents[2]


class Predicted(NamedTuple):
    """Seconds of attention per step: in total, and of its kernel calls alone."""

    attention_s: float
    kernels_s: float


def main() -> None:
    """Train, measure, predict and write the tables."""
    on_mesh = [run for world_size in WORLD_SIZES for run in _on_mesh(world_size)]
    write_record(RESULTS / "training.json", {"recipe": vars(RECIPE), "on_mesh": on_mesh})
    publish()


def publish() -> None:
    """Write the table from the record."""
    record = read_record(RESULTS / "training.json")
    rows = record["on_mesh"]
    for run in rows:
        run["step_s"] = RECIPE.tokens / run["tokens_per_s"]
        run["measured_s"] = run["attention_share"] * run["step_s"]
    columns: Formats = {
        "ranks, schedule": "{processes}, {schedule}",
        "step s": "{step_s:.2f}",
        "attention s": "{measured_s:.2f}",
        "predicted s": "{attention_s:.2f}",
        "error": lambda run: f"{run['attention_s'] / run['measured_s'] - 1:+.0%}",
        "communication": lambda run: f"{(run['measured_s'] - run['kernels_s']) / run['step_s']:.0%}",
        "predicted": lambda run: f"{(run['attention_s'] - run['kernels_s']) / run['step_s']:.0%}",
    }
    parts = [
        f"The training example ({len(RECIPE.layers)} layers, {RECIPE.heads} heads of {RECIPE.head_dim}, {RECIPE.seq} "
        f"positions, batch {RECIPE.batch}, float32), made by `python -m experiments.tables.training`.",
        "Ranks on an emulated mesh: attention of a step, and the communication in it as a share of the step. "
        f"They share {record['machine']['cores']} cores with their own threads of communication, which are in no "
        "prediction; with fewer cores than ranks the error is not that of the communication.",
        table(rows, columns),
    ]
    write_page(RESULTS / "training.md", "\n\n".join(parts))


def _on_mesh(world_size: int) -> list[dict[str, Any]]:
    """Every schedule on an emulated mesh, measured and predicted."""
    mesh = full_mesh(world_size)
    mesh = mesh.scaled(default_scale(mesh, nominal_s=1.0))
    layer = RECIPE.layer("S", RECIPE.batch)
    passes = {name: attention_passes(name, mesh, layer) for name in CIRCULATIONS}
    with emulate(mesh) as locations:
        with launch(locations) as ranks:
            machine = calibrate(mesh, ranks).machine
            predicted = {name: _predict(each, ranks, machine) for name, each in passes.items()}
        return [
            {"processes": world_size, **_train_on_fabric(locations, name), **predicted[name]._asdict()}
            for name in CIRCULATIONS
        ]


def _predict(passes: Sequence[Schedule], ranks: Ranks, machine: Machine) -> Predicted:
    attention_s = kernels_s = 0.0
    for schedule in passes:
        found = ranks.perform(MeasureCompute(schedule, repeats=3), 120.0)
        seconds = [each.time_s for each in found if isinstance(each, KernelTimes)]
        rate = ComputeRate(float(schedule.flops().sum()) / sum(seconds))
        attention_s += float(simulate(schedule, Machine(machine.topology, machine.comm_library, rate)).time_s)
        kernels_s += sum(seconds) / len(seconds)
    return Predicted(len(RECIPE.layers) * attention_s, len(RECIPE.layers) * kernels_s)


def _train_on_fabric(locations: Sequence[RankLocation], schedule: str) -> dict[str, Any]:
    """The JSON document of a training run whose ranks are in the namespaces of a fabric."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "experiments.tables.training", str(rank), str(len(locations)), schedule, folder,
                 place.interface, str(place.network_namespace), str(place.user_namespace)],
                cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                pass_fds=[each for each in (place.network_namespace, place.user_namespace) if each >= 0],
            )
            for rank, place in enumerate(locations)
        ]  # fmt: skip
        printed = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "every rank ends well"
    found: dict[str, Any] = json.loads(printed[0])
    return found


def _be_rank(rank: int, world_size: int, schedule: str, folder: str, place: RankLocation) -> None:
    """Run a rank of the example in its namespaces, which a process must join while single-threaded."""
    from runtime.linux import CLONE_NEWNET, CLONE_NEWUSER, join_namespace

    if place.user_namespace >= 0:
        join_namespace(place.user_namespace, CLONE_NEWUSER)
    join_namespace(place.network_namespace, CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface

    import torch.distributed as dist

    from experiments.train_gpt.__main__ import document
    from experiments.train_gpt.options import RunOptions
    from experiments.train_gpt.train import train

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    run = RunOptions(steps=STEPS, schedule=schedule)
    steps = train(RECIPE, run)
    if rank == 0:
        print(json.dumps(document(RECIPE, run, steps)))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _be_rank(
            int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4],
            RankLocation(sys.argv[5], int(sys.argv[6]), int(sys.argv[7])),
        )  # fmt: skip
    else:
        main()
