"""Steps of MaxText on TPU v5p by context-parallel strategy beside predictions, to which nothing was tuned.

``python -m experiments.tables.tpu_steps`` writes ``experiments/results/tpu_steps.md`` in a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.common import RESULTS, table, write_page
from tasp_lab import Layout, predict_step
from tasp_lab.prediction.step_results import StepPrediction
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions

PEAK_FLOPS_PER_S = 459e12
LAYOUT = Layout(cp=16, checkpointing="selective")
RING = AttentionOptions(trim=False, passes="both", dataflow="rotate-kv", gradient_dtype="fp32")

TEXT = """\
Steps of MaxText on TPU v5p beside predictions, made by `python -m experiments.tables.tpu_steps`: llama2-7b, 32Ki \
positions, context axis of 16 on 64 chips, 2Mi tokens a step (AI-Hypercomputer/maxtext#4687, 2026-07-31). Nothing was \
tuned to them. MFU: MaxText's count of FLOPs over the time and 459 TFLOP/s. Ring / this: the step of MaxText's ring \
over that of the row. Rows without a measured time are proposals that nobody has published.

Taken from MaxText's sources (e591f30c): JAX gives a mesh axis whole axes of the torus (`create_device_mesh`), so 16 \
chips are a 4x4 plane of `tpu-v5p:4x4x4`; only the output of attention is kept for the backward pass (remat policy \
`custom`, `context=device`: `selective` here); the sequence is balanced as a zigzag; the ring sends keys and values in \
bf16 in one direction, untrimmed, and backward the same again with their gradients in float32 \
(`ring_attention_kernel.py`: `--no-trim --dataflow rotate-kv --gradient-dtype fp32`). That XLA gathers keys and values \
both ways of both axes, as `multi-ring-kv-all-gather`, is an assumption (How to Scale Your Model, 2025, part 3). A \
group has 16 sequences in one micro-batch, 2Mi tokens over 64 chips.

Not modelled: element-wise work, for which no memory rate of TPUs is known here; shorter kernel calls in rings, and \
the merging of their partial results; the start of operations; gathers that XLA hides behind matrices."""


@dataclass(frozen=True)
class Strategy:
    """A strategy of context parallelism as a schedule, with the measured seconds if MaxText has it."""

    name: str
    schedule: str
    options: AttentionOptions = DEFAULT_OPTIONS
    measured_s: float | None = None

    def predict(self, layers: int = 8) -> StepPrediction:
        """The step; of equal layers at most so many are simulated."""
        return predict_step("tpu-v5p:4x4x4", "llama-2-7b", 32768, self.schedule, layout=LAYOUT, batch=16,
                            options=self.options, layers=layers)  # fmt: skip


STRATEGIES = (
    Strategy("Ulysses", "ulysses", measured_s=8.90),
    Strategy("all-gather", "multi-ring-kv-all-gather", measured_s=8.83),
    Strategy("ring", "zigzag-ring-attention", RING, measured_s=16.38),
    Strategy("multi-ring", "tasp"),
)
FLOPS_OF_STEP = 130.8e12 * 16.38  # per chip, as MaxText counts them: those per second of its ring, times the time


def main() -> None:
    """Predict all strategies, and write the table."""
    predicted = {each.name: float(each.predict().time_s) for each in STRATEGIES}
    measured = {each.name: each.measured_s for each in STRATEGIES if each.measured_s}
    rows: list[dict[str, str]] = []
    for each in STRATEGIES:
        row = {"strategy": each.name, "schedule": f"`{each.schedule}`"}
        for what, times in (("measured", measured), ("predicted", predicted)):
            seconds = times.get(each.name)
            row[what] = f"{seconds:.2f} s" if seconds else ""
            row[f"MFU {what}"] = f"{FLOPS_OF_STEP / seconds / PEAK_FLOPS_PER_S:.1%}" if seconds else ""
            row[f"ring / this, {what}"] = f"{times['ring'] / seconds:.2f}" if seconds else ""
        rows.append(row | {"error": f"{predicted[each.name] / each.measured_s - 1:+.0%}" if each.measured_s else ""})
    write_page(RESULTS / "tpu_steps.md", f"{TEXT}\n\n{table(rows, {name: f'{{{name}}}' for name in rows[0]})}")


if __name__ == "__main__":
    main()
