"""Published slowdowns of kernels beside communication, and what the model of contention says of each.

``python -m experiments.tables.contention`` writes ``experiments/results/contention.md``.

The model has two constants: the multiprocessors of a GPU, from data sheets, and one multiprocessor per channel, from
NVIDIA/nccl#689. Neither comes from these rows. The channels of a row are those that its source names, else those of
the machine's profile. A kernel is taken to run beside messages from its beginning to its end unless the source gives
enough to say how long both lasted, so most predictions are the largest slowdown that the model has for the row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common import RESULTS, Formats, markdown_table, table, write_page
from sim.simulate import simulate
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import accelerator_parameters
from tasp_lab.machines.contention import Contention
from tasp_lab.machines.profile import load_profile
from tasp_lab.schedules.collectives.library_rings import library_schedule

MIB = 2**20


@dataclass(frozen=True)
class Slowdown:
    """A published slowdown of a kernel, together / alone, lowest and highest, and the `channels` beside it."""

    gpu: str
    kernel: str
    beside: str
    measured: list[float]
    channels: int
    source: str
    remark: str

    @property
    def predicted(self) -> float:
        """Together / alone, if messages are in flight all the time."""
        return float(1 / (1 - contention(self.gpu, self.channels).share(self.channels, self.channels)))


def contention(gpu: str, channels: int) -> Contention:
    """The contention of a GPU whose messages have at most so many channels."""
    sms = next(int(each.number) for each in accelerator_parameters(gpu) if each.name == "sms")
    return Contention(sms, 1, channels)


def _channels(family: str) -> int:
    """The channels of a collective within one node, by the profile."""
    return int(load_profile(family).parameters.numbers["channels"])


def slowdowns() -> list[Slowdown]:
    """The rows of ``contention.toml``."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["slowdowns"]
    return [Slowdown(**row | {"channels": row.get("channels") or _channels(row["gpu"])}) for row in rows]


def overlapped_matmul() -> Sequence[tuple[str, float | None, float | None]]:
    """8192^3 in fp16 beside an all-gather of 64 MiB on eight H100: the one source with all times of both.

    Measured and predicted seconds.
    """
    in_turn_s, together_s, by_copies_s = 2960e-6, 2020e-6, 1770e-6
    machine = load_machine("h100-8")
    gather = library_schedule("all_gather", machine.topology, machine.topology.world_size * 64 * MIB)
    gather_s = float(simulate(gather, machine).time_s)
    matmul_s = in_turn_s - gather_s
    share = float(contention("h100", _channels("h100")).share(_channels("h100"), 0))
    predicted_s = matmul_s + share * min(gather_s, matmul_s / (1 - share))
    return [
        ("one after the other", in_turn_s, None),
        ("of these the all-gather", None, gather_s),
        ("together, channels", together_s, predicted_s),
        ("together, copy engines", by_copies_s, matmul_s),
        ("what channels cost", together_s - by_copies_s, predicted_s - matmul_s),
    ]


def main() -> None:
    """Write the table."""
    rows = slowdowns()
    errors = sorted(abs(2 * each.predicted / sum(each.measured) - 1) for each in rows)
    columns: Formats = {
        "kernel": lambda row: f"{row.gpu}: {row.kernel}, beside {row.beside}",
        "channels": lambda row: str(row.channels),
        "measured": lambda row: " to ".join(dict.fromkeys(f"{each:.2f}" for each in row.measured)),
        "model": lambda row: f"{row.predicted:.2f}",
        "error": lambda row: f"{2 * row.predicted / sum(row.measured) - 1:+.0%}",
        "remark": lambda row: row.remark,
        "source": lambda row: row.source,
    }
    beside = [
        (
            what,
            *("" if time_s is None else f"{time_s * 1e6:.0f} us" for time_s in (measured_s, predicted_s)),
            f"{predicted_s / measured_s - 1:+.0%}" if measured_s and predicted_s else "",
        )
        for what, measured_s, predicted_s in overlapped_matmul()
    ]
    parts = [
        "Slowdowns of kernels beside communication, together / alone, by `python -m experiments.tables.contention`."
        f" Median error {errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}; nothing is tuned to these rows, and a"
        " row's error tells what the model leaves out (decision 22).",
        table(rows, columns),
        "A matmul of 8192 x 8192 x 8192 in fp16 beside an all-gather of 64 MiB on eight H100"
        " (pytorch/pytorch pull 172714). The source does not say whether 64 MiB are of one GPU or of all; if of all,"
        " the matmul alone would have to take longer than both together did. The all-gather alone is our prediction,"
        " the matmul alone the rest of both in turn:",
        markdown_table(("h100-8", "measured", "model", "error"), beside),
    ]
    write_page(RESULTS / "contention.md", "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
