"""Published steps of whole models: which prediction each row is, or why there is none."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as changed

from tasp_lab import Layout, load_machine, load_model, predict_step
from tasp_lab.core.choices import MatrixDtype
from tasp_lab.machines.compute import with_kernel
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.step_results import StepPrediction
from tasp_lab.prediction.training_step.rates import StepRates, step_rates
from tasp_lab.topology.derived import induced
from tasp_lab.workload.models.parameters import active_parameters

FOLDER = Path(__file__).parents[1] / "published" / "whole_steps"

NO_LAYOUT = "the layout is not published"
MANY_GPUS = 512
TOO_MANY = f"more than {MANY_GPUS} GPUs take minutes to simulate"
NO_H20 = "no machine of the catalogue has H20 with NVLink"

Cells = dict[str, str]


@dataclass(frozen=True)
class PublishedStep:
    """A row: what was measured, and the prediction, or the reason why there is none.

    `other_error` is the error if something that the table does not say is taken in another way; `measured_bytes` the
    published peak of memory. Where measured times have parts that are no steps, equal for all numbers of GPUs,
    `one_gpu` is the row of one GPU, and the time that more GPUs save is compared. `simumax` is the time in seconds and
    the peak in bytes that SimuMax predicts.
    """

    source: str
    what: str
    variant: str
    gpus: int
    positions: int
    measured_s: float | None
    predicted: StepPrediction | None
    reason: str = ""
    other_error: float | None = None
    measured_bytes: float | None = None
    one_gpu: PublishedStep | None = None
    simumax: tuple[float, float] | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured time, less one; of the time that is saved on `one_gpu`, if there is one."""
        if self.predicted is None or self.measured_s is None:
            return None
        measured_s, predicted_s = self.saved_s or (self.measured_s, self.predicted.time_s)
        return predicted_s / measured_s - 1

    @property
    def saved_s(self) -> tuple[float, float] | None:
        """By how much the step is shorter than on `one_gpu`, measured and predicted; None without such a row."""
        one = self.one_gpu
        if one is None or None in (one.predicted, one.measured_s, self.predicted, self.measured_s):
            return None
        return one.measured_s - self.measured_s, one.predicted.time_s - self.predicted.time_s  # type: ignore[operator, union-attr]

    def to_dict(self) -> dict[str, object]:
        """The row as JSON, with the command's own object."""
        # intervals are made from these rows
        left_out = ("provenance", "time_low_s", "time_high_s", "interval")
        found = None
        if self.predicted is not None:
            found = {name: value for name, value in self.predicted.to_dict().items() if name not in left_out}
        return {name: getattr(self, name) for name in _FIELDS} | {"saved_s": self.saved_s, "predicted": found}


_FIELDS = (
    "source", "what", "variant", "gpus", "positions", "measured_s", "error", "other_error", "measured_bytes", "reason",
    "simumax",
)  # fmt: skip


def published_steps(say: Callable[[str], None]) -> Iterator[PublishedStep]:
    """All rows of all tables, in their order."""
    tables: dict[str, Callable[[Cells], PublishedStep]] = {
        "torchtitan": _torchtitan,
        "nemo": _nemo,
        "prime_rl": _prime_rl,
        "xdit": _xdit,
        "simumax": _simumax,
        "trl": _trl,
    }
    for name, row_of in tables.items():
        lines = [line for line in (FOLDER / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
        alone: dict[str, PublishedStep] = {}
        for cells in sorted(csv.DictReader(lines), key=lambda cells: name == "xdit" and cells["gpus"] != "1"):
            say(f"{name}: {cells['what']}, {cells['variant']}")
            row = row_of(cells)
            if name == "xdit" and row.predicted is not None:
                # text encoders and VAE, which GPUs do not share, are in the measured time
                if row.gpus == 1:
                    alone[row.what] = row
                    row = replace(row, predicted=None, reason="one GPU, from which savings of more are counted")
                else:
                    row = replace(row, one_gpu=alone[row.what])
            yield row


def _row(
    source: str, cells: Cells, predicted: StepPrediction | None, measured_s: float | None, reason: str = ""
) -> PublishedStep:
    positions = int(cells["positions"] or 0)
    gpus = int(cells["gpus"])
    return PublishedStep(source, cells["what"], cells["variant"], gpus, positions, measured_s, predicted, reason)


def _number(pattern: str, text: str, default: int = 1) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else default


def _torchtitan(cells: Cells) -> PublishedStep:
    """Llama 3.1 with FSDP; in a pipeline as many micro-batches as stages."""
    step = _torchtitan_step(cells)
    row = _row("torchtitan", cells, step, step.tokens / (float(cells["tokens_per_s_per_gpu"]) * step.ranks))
    return replace(row, measured_bytes=float(cells["memory_gib"]) * 2**30)


POWER = 500 / 700
"""Power limit of torchtitan's GPUs over that at which kernels of attention were measured."""


TORCHAO = "torchao eab345c, torchao/float8/roofline_utils.py, on such a GPU"
"""What measured the rates beside attention of torchtitan's GPUs, in the version that its table names."""

MATRICES, MEMORY_BYTES_PER_S = {"bf16": 0.6 * 989e12, "fp8": 0.6 * 1979e12}, 0.92 * 2.4e12


def _grand_teton(gpus: int) -> Machine:
    """H100 with a lower limit of power: attention follows its cube root, as voltage follows the clock (assumed).

    PyTorch of that time ran FlashAttention-2.
    """
    machine = with_kernel(load_machine("h100-8" if gpus == 8 else f"h100-{gpus // 8}x8"), "flash-attention-2")
    return replace(machine, compute=machine.compute.scaled(POWER ** (1 / 3)))


def _grand_teton_rates(machine: Machine, dtype: MatrixDtype) -> StepRates:
    """What its GPUs reach besides attention; their memory has 2.4 TB/s."""
    matrices, output = (ComputeRate(MATRICES[each], TORCHAO) for each in (dtype, "bf16"))
    return replace(
        step_rates(machine, dtype),
        matrices=matrices,
        output=output,
        memory_bytes_per_s=MEMORY_BYTES_PER_S,
        memory_source=TORCHAO,
    )


def _torchtitan_step(cells: Cells, compute: str | None = None) -> StepPrediction:
    said, gpus, batch = f"{cells['variant']}, {cells['what']}", int(cells["gpus"]), int(cells["batch"])
    tp, pp, cp = (_number(rf"{name} ?(\d+)", said) for name in ("TP", "PP", "CP"))
    machine = _grand_teton(gpus)
    dtype: MatrixDtype = "fp8" if "Float8" in said else "bf16"
    count = 1 if pp == 1 else pp  # torchtitan 9dec370, pipelining_utils.py: as many as stages unless given
    model = load_model(next(name for size, name in _LLAMA.items() if size in said))
    return predict_step(
        machine,
        changed(model, attention=changed(model.attention, repeats_kv=True)),  # model.py there: repeat_kv
        int(cells["positions"]),
        "kv-all-gather",
        layout=Layout(
            tp=tp,
            cp=cp,
            pp=pp,
            dp=gpus // (tp * cp * pp),
            # In a pipeline torchtitan keeps gathered parameters from one micro-batch to the next.
            zero=3 if pp == 1 else 1,
            interleave=2 if "interleaved" in said else 1,
            microbatches=count,
            checkpointing="selective" if "selective" in said else "full",
        ),
        batch=batch // count,
        matrix_dtype=dtype,
        fused="eager" not in said,
        rates=_grand_teton_rates(machine, dtype),
        compute=compute,
    )


_LLAMA = {"405B": "llama-3-405b", "70B": "llama-3-70b", "8B": "llama-3-8b"}


def attention_rates(row: PublishedStep) -> tuple[float, float]:
    """FLOP/s per GPU that attention reaches in a row of torchtitan if all else is as predicted: measured, predicted.

    With full checkpointing it computes 4.5 times its forward FLOPs: forward twice, and 2.5 times backward.
    """
    step = row.predicted
    assert step is not None, "a row with a prediction"
    assert row.measured_s is not None, "a row with a prediction has a measured time"
    cells = {"positions": str(row.positions), "variant": row.variant, "what": row.what, "gpus": "8", "batch": "1"}
    rest_s = _torchtitan_step(cells, "timed:1000000TFLOP/s").time_s
    forward = step.model_flops // 3 - 2 * step.tokens * active_parameters(step.plan.model)
    return tuple(4.5 * forward / row.gpus / (each - rest_s) for each in (row.measured_s, step.time_s))  # type: ignore[return-value]


def _nemo(cells: Cells) -> PublishedStep:
    """Steps of 4Mi tokens, one sequence per replica and micro-batch, sharded optimizer, nothing computed again.

    With NeMo 24.03 attention on H100 was FlashAttention-2: NeMo-Framework-Launcher 24.03 switches cuDNN off
    (``NVTE_FUSED_ATTN: 0``, launcher_scripts/conf/config.yaml), until July 2024.
    """
    layout = re.search(r"TP (\d+) x CP (\d+)(?: x PP (\d+))?", cells["variant"])
    if layout is None:
        return _row("nemo", cells, None, None, NO_LAYOUT)
    positions, gpus = int(cells["positions"]), int(cells["gpus"])
    if gpus > MANY_GPUS:
        return _row("nemo", cells, None, None, TOO_MANY)
    tp, cp, pp = (int(each or 1) for each in layout.groups())
    replicas = gpus // (tp * cp * pp)
    b200 = "B200" in cells["what"]
    step = predict_step(
        f"{'b200' if b200 else 'h100'}-{gpus if gpus <= 8 else f'{gpus // 8}x8'}",
        "llama-3-8b" if b200 else "llama-2-7b",
        positions,
        "zigzag-ring-attention",
        layout=Layout(
            tp, cp, pp, replicas, 1, checkpointing="none", microbatches=max(1, 2**22 // positions // replicas)
        ),
        matrix_dtype="fp8",
        kernel="cudnn" if b200 else "flash-attention-2",
    )
    rate = float(cells["tflops_per_gpu"]) * 1e12 * gpus
    matrices, attention = 6 * active_parameters(step.plan.model), 3 * _full_attention(positions)
    row = _row("nemo", cells, step, step.tokens * (matrices + attention) / rate)
    return replace(row, other_error=step.time_s * rate / (step.tokens * (matrices + attention / 2)) - 1)


def _full_attention(positions: int) -> int:
    """FLOPs of attention of Llama 2 7B and 3 8B per token, forward, all pairs counted."""
    return 32 * 32 * 4 * 128 * positions


def _prime_rl(cells: Cells) -> PublishedStep:
    """GLM-4.5-Air with FSDP over all GPUs, taken to compute all layers again.

    The table has FlashAttention-3; rings are those of ring-flash-attention, which calls FlashAttention-2.
    """
    ring = "ring" in cells["variant"]
    step = _prime_rl_step(cells, "flash-attention-2" if ring else "flash-attention-3")
    row = _row("prime-rl", cells, step, step.tokens / (float(cells["tokens_per_s_per_gpu"]) * step.ranks))
    if not ring or row.measured_s is None:
        return row
    return replace(row, other_error=_prime_rl_step(cells, "flash-attention-3").time_s / row.measured_s - 1)


def _prime_rl_step(cells: Cells, kernel: str) -> StepPrediction:
    way, _, members = cells["variant"].partition(" cp ")
    schedule = "zigzag-ring-attention" if way == "ring" else "ulysses"
    positions = int(cells["positions"])
    return predict_step("h200-8", "glm-4.5-air", positions, schedule, layout=Layout(cp=int(members)), kernel=kernel)


_MODELS = {"FLUX": "flux-1-dev", "HunyuanVideo": "hunyuan-video", "ConsisID": "cogvideox-5b"}


def _xdit(cells: Cells) -> PublishedStep:
    """A denoising step: all layers forward, all parameters at each rank; FlashAttention-2, as yunchang calls it."""
    what = cells["what"]
    if "H20" in what:
        return _row("xDiT", cells, None, None, NO_H20)
    if "Step-Video" in what:
        return _row("xDiT", cells, None, None, "the number of positions is not published")
    split = _number(r"cfg (\d+)", cells["variant"])
    gpus = int(cells["gpus"])
    step = predict_step(
        _part("l20-8-pcie", gpus) if "L20" in what else load_machine(f"h100-{gpus}"),
        load_model(str(FOLDER / f"{next(_MODELS[each] for each in _MODELS if each in what)}.toml")),
        int(cells["positions"]),
        _xdit_schedule(cells["variant"]),
        layout=Layout(cp=gpus // split, zero=0),
        batch=int(cells["batch"]),
        passes="forward",
        fused="torch.compile" in what,
        kernel="flash-attention-2",
    )
    return _row("xDiT", cells, step, float(cells["time_us"]) / 1e6)


def _xdit_schedule(variant: str) -> str:
    ulysses, ring = (_number(rf"{name} (\d+)", variant) for name in ("ulysses", "ring"))
    if ring == 1:
        return "ulysses"
    return "ring-attention" if ulysses == 1 else f"usp:{ulysses}x{ring}"


def _simumax(cells: Cells) -> PublishedStep:
    """Megatron with Transformer Engine, as its stack is by default; SimuMax was told the same."""
    tp, cp, pp, dp = (_number(rf"{name} (\d+)", cells["variant"]) for name in ("TP", "CP", "PP", "DP"))
    count = _number(r"(\d+) micro", cells["what"])
    step = predict_step(
        "b200-8",
        load_model(str(FOLDER / "llama-3-70b-l12.toml")),
        int(cells["positions"]),
        "ulysses",
        layout=Layout(tp, cp, pp, dp, 1, checkpointing="none", microbatches=count),
        stack="megatron",
    )
    row = _row("SimuMax", cells, step, float(cells["time_us"]) / 1e6)
    theirs = float(cells["simumax_ms"]) / 1e3, float(cells["simumax_gib"]) * 2**30
    return replace(row, measured_bytes=float(cells["memory_gib"]) * 2**30, simumax=theirs)


def _trl(cells: Cells) -> PublishedStep:
    """The ring of PyTorch; its kernel is the stack's, save where torch fell back to another one."""
    step = predict_step(
        "h100-8",
        load_model(cells["what"].lower().replace(" ", "-")),
        int(cells["positions"]),
        "zigzag-ring-attention",
        layout=Layout(checkpointing="offload", logit_chunks=64, offload=True),
        stack="trl",
        kernel=None if cells["variant"] == "cudnn" else cells["variant"],
    )
    return _row("TRL", cells, step, float(cells["time_us"]) / 1e6)


def _part(name: str, ranks: int) -> Machine:
    """The first ranks of a machine."""
    machine = load_machine(name)
    return replace(machine, topology=induced(machine.topology, range(ranks)))
