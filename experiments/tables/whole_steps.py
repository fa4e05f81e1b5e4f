"""Published steps of whole models beside predictions, to which nothing was tuned.

The records in ``experiments/published/whole_steps`` are tables of torchtitan, NeMo, prime-rl, xDiT, SimuMax and TRL.
``python -m experiments.tables.whole_steps`` writes ``experiments/results/whole_steps.json``, its table ``.md`` and
``experiments/results/beside_simumax.md`` in ten minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from experiments.common import RESULTS, Formats, markdown_table, read_record, table, write_page, write_record
from experiments.tables.published_steps import attention_rates, published_steps
from tasp_lab.core.progress import print_progress as progress

Row = Mapping[str, Any]
"""A row of the record."""

CLOSE = 0.15
"""Errors up to this are counted as close."""

HEAD = """\
Published steps of whole models beside predictions, made by `python -m experiments.tables.whole_steps`. No constant \
was fitted to them, but four readings were chosen with the errors in sight: what xDiT is compared by, the kernels of \
prime-rl's rings and of NeMo on H100, and the rates of torchtitan's GPUs; all but the first have a source. Error: \
predicted over measured time, less one; for xDiT, of the time that more GPUs save. Exposed: the share of the predicted \
step that is waiting for messages. GiB: published over predicted peak of memory. Records with their sources: \
`experiments/published/whole_steps`. What is known of the causes is in `docs/whole_steps.md`."""

TEXTS = {
    "torchtitan": """\
Llama 3.1 on H100 with memory of 2.4 TB/s, whose power is limited to 500 W instead of 700. Matrices and memory as \
torchao measured them on such a GPU (`torchao/float8/roofline_utils.py` of eab345c, the version of the table): 593 \
TFLOP/s, 1187 in 8 bits, 2.2 TB/s. Attention follows the cube root of the power, an assumption. Context groups with KV \
all-gather; keys and values are repeated for all heads before. Pipelines have as many micro-batches as stages, the \
default, and keep gathered parameters, as ZeRO 1 here. The peak of memory is what PyTorch's allocator reserves, free \
blocks among it.""",
    "nemo": """\
Llama 2 7B on DGX H100 and Llama 3 8B on DGX B200: p2p ring in context groups, ZeRO 1, 4Mi tokens a step, FP8 \
matrices, nothing computed again. Attention is FlashAttention-2 on H100, as NeMo-Framework-Launcher 24.03 switches \
cuDNN off (`launcher_scripts/conf/config.yaml`: `NVTE_FUSED_ATTN: 0`), and cuDNN on B200. Measured times follow from \
TFLOP/s with causal attention counted in full, as nemo/utils/flops_formulas.py of NeMo did at first (later versions \
count half).""",
    "prime-rl": """\
GLM-4.5-Air on 8 H200: FSDP, FlashAttention-3, in rings FlashAttention-2, which ring-flash-attention calls; full \
checkpointing is assumed. In mixed precision its states do not fit, so they are elsewhere or of another precision. \
Experts are taken as equally loaded.""",
    "xDiT": """\
Denoising steps of diffusion transformers, forward only. Measured is the whole latency over the number of steps, with \
text encoders and VAE, which do not shrink with GPUs. So what is compared is how much less more GPUs take than one.""",
    "SimuMax": """\
Megatron-LM with Transformer Engine on 8 B200, one sequence per micro-batch, as `--stack megatron` is without flags: \
messages of parameters and gradients before and behind the layers. Beside SimuMax: `beside_simumax.md`.""",
    "TRL": """\
FSDP2 and PyTorch's ring of 1Mi positions on 8 H100, layer inputs and optimizer states on the host. The kernel is that \
of `--stack trl`, save in the row where torch fell back to FlashAttention-2.""",
}

OTHERWISE = {
    "nemo": "With causal attention counted in half",
    "prime-rl": "With FlashAttention-3 in the rings, too",
}
"""Other readings of a table."""

GROUPS = {
    "torchtitan, FSDP, compiled": ("torchtitan", "selective AC, FSDP, compiled"),
    "torchtitan, FSDP, eager": ("torchtitan", "selective AC, FSDP, eager"),
    "torchtitan, tensor groups and pipelines": ("torchtitan", "full AC, FSDP|405B.*, CP 1 "),
    "torchtitan, context groups on 8 GPUs": ("torchtitan", "Llama 3.1 8B.*, CP "),
    "torchtitan, context groups on 512 GPUs": ("torchtitan", "405B.*, CP [248] "),
    "NeMo, H100": ("nemo", "H100"),
    "NeMo, B200": ("nemo", "B200"),
    "prime-rl": ("prime-rl", ""),
    "FLUX, compiled": ("xDiT", "FLUX.*torch.compile"),
    "FLUX, eager": ("xDiT", "FLUX.*eager"),
    "HunyuanVideo, H100": ("xDiT", "HunyuanVideo.*H100"),
    "HunyuanVideo, L20": ("xDiT", "HunyuanVideo.*L20"),
    "ConsisID": ("xDiT", "ConsisID"),
    "SimuMax, tensor groups of 8": ("SimuMax", "TP 8"),
    "SimuMax, other layouts": ("SimuMax", "(TP [24]|CP 8|, PP 2)"),
    "TRL": ("TRL", ""),
}
"""Rows that miss for the same cause: their source, and a pattern of model and variant."""


def groups_of(records: Sequence[Row]) -> dict[str, list[float]]:
    """The errors of each group, in the order of rows. Every predicted row is in one."""
    errors: dict[str, list[float]] = {name: [] for name in GROUPS}
    for row in records:
        if row["error"] is not None:
            said = f"{row['what']}, {row['variant']}"
            (name,) = (
                name
                for name, (source, pattern) in GROUPS.items()
                if row["source"] == source and re.search(pattern, said)
            )
            errors[name].append(row["error"])
    return errors


def groups_table(records: Sequence[Row]) -> str:
    """Median and range of the errors of each group."""
    rows = [
        [name, str(len(own)), f"{median(map(abs, own)):.0%}", f"{min(own):+.0%} to {max(own):+.0%}"]
        for name, own in groups_of(records).items()
    ]
    return markdown_table(("rows of", "rows", "median error", "from, to"), rows)


def main() -> None:
    """Predict everything, and write the record and the page."""
    rows = list(published_steps(progress))
    rates = [
        attention_rates(row) for row in rows if row.source == "torchtitan" and "CP" in row.variant and row.gpus == 8
    ]
    write_record(RESULTS / "whole_steps.json", {"rows": [row.to_dict() for row in rows], "torchtitan_attention": rates})
    publish()


def publish() -> None:
    """Write the page from the record."""
    record = read_record(RESULTS / "whole_steps.json")
    rows, rates = record["rows"], record["torchtitan_attention"]
    parts = ["# Whole steps", HEAD, summary_of(rows), groups_table(rows), "## Which layout", *layouts_of(rows)]
    for source, text in TEXTS.items():
        own = [row for row in rows if row["source"] == source]
        parts += [f"## {source}", text, table((row for row in own if row["error"] is not None), COLUMNS)]
        parts += [rates_of(rates)] if source == "torchtitan" else []
        parts += [otherwise_of(own), left_out_of([row for row in own if row["error"] is None])]
    write_page(RESULTS / "whole_steps.md", "\n\n".join(part for part in parts if part))
    write_page(RESULTS / "beside_simumax.md", beside_simumax([row for row in rows if row["simumax"]]))


def beside_simumax(rows: Sequence[Row]) -> str:
    """The rows that SimuMax predicted, with the errors of both."""
    found = []
    for row in rows:
        measured, ours = (row["measured_s"], row["measured_bytes"]), row["predicted"]
        errors = [each / one - 1 for each, one in zip(row["simumax"], measured, strict=True)]
        own = [ours["time_s"] / measured[0] - 1, ours["memory_bytes"] / measured[1] - 1]
        found.append({**row, "their_s": errors[0], "their_bytes": errors[1], "our_s": own[0], "our_bytes": own[1]})
    middle = {name: [abs(row[name]) for row in found] for name in ("our_s", "their_s", "our_bytes", "their_bytes")}
    lines = [[name, *(f"{each(values):.1%}" for each in (median, max) for values in pair)]
             for name, pair in (("time", (middle["our_s"], middle["their_s"])),
                                ("memory", (middle["our_bytes"], middle["their_bytes"])))]  # fmt: skip
    head = ("", "tasp-lab, median", "SimuMax, median", "tasp-lab, most", "SimuMax, most")
    return "\n\n".join((BESIDE, markdown_table(head, lines), table(found, BESIDE_COLUMNS), TOLD))


BESIDE = """\
# Whole steps beside SimuMax

Steps of Megatron-LM on 8 B200, measured and predicted by SimuMax 1.2 in `docs/b200/b200_release_v1.2_summary.md` of \
its repository (4dcaae5), beside predictions here; made by `python -m experiments.tables.whole_steps`. Errors are \
predicted over measured, less one."""

TOLD = markdown_table(
    ("what each was told of", "SimuMax", "tasp-lab"),
    [
        ["matrices", "the rate of each shape, measured there", "a form fitted to those rates (`matrix_accuracy.md`)"],
        [
            "attention",
            "the rate of each call, measured there",
            "a kernel model, fitted to the nine calls of 1 ms or more",
        ],
        ["messages", "bandwidths measured there", "NCCL, fitted to nccl-tests on other B200"],
        ["steps", "none", "none"],
        ["overlap, loss, optimizer", "as the steps were run", "as `--stack megatron` is by default"],
    ],
)

BESIDE_COLUMNS: Formats = {
    "model": "{what}",
    "layout": "{variant}",
    "positions": "{positions}",
    "measured s": "{measured_s:.4g}",
    "tasp-lab": "{our_s:+.1%}",
    "SimuMax": "{their_s:+.1%}",
    "measured GiB": lambda row: f"{row['measured_bytes'] / 2**30:.1f}",
    "tasp-lab, memory": "{our_bytes:+.1%}",
    "SimuMax, memory": "{their_bytes:+.1%}",
}
"""The columns of rows that SimuMax predicted."""


def summary_of(rows: Sequence[Row]) -> str:
    """How many rows there are, and how far they are off."""
    errors = [row["error"] for row in rows if row["error"] is not None]
    close = sum(abs(error) <= CLOSE for error in errors)
    middle = median(abs(error) for error in errors)
    corrected, inside = left_out(rows)
    return (
        f"{len(rows)} rows, {len(errors)} of them predicted: {close} within 15 %, median error {middle:.0%}, "
        f"{sum(error < 0 for error in errors)} too fast. If times are multiplied by the median of measured over "
        f"predicted time of the other sources, the median error is {corrected:.0%}; {inside} of {len(errors)} rows are "
        "within the 5 to 95 % of these ratios."
    )


def left_out(rows: Sequence[Row]) -> tuple[float, int]:
    """The median error of rows that are corrected by other sources, and how many lie within their interval."""
    ratios: dict[str, list[float]] = {row["source"]: [] for row in rows}
    for row in rows:
        if row["error"] is not None:
            ratios[row["source"]].append(1 / (1 + row["error"]))
    errors, inside = [], 0
    for source, own in ratios.items():
        others = np.array([ratio for other, found in ratios.items() if other != source for ratio in found])
        low, middle, high = np.quantile(others, (0.05, 0.5, 0.95))
        errors += [abs(middle / ratio - 1) for ratio in own]
        inside += sum(low <= ratio <= high for ratio in own)
    return median(errors), inside


def layouts_of(records: Sequence[Row]) -> list[str]:
    """What the layout that is predicted to be fastest costs, of those that a source measured of one model."""
    found = regrets_of(records)
    regrets = [regret for *_, regret in found]
    text = (
        f"{len(found)} times a source measured several layouts or schedules of one model on as many GPUs, compared by "
        f"the time per token. The one that is predicted to be fastest takes {np.mean(regrets):.1%} longer than the "
        f"fastest measured one (mean; at most {max(regrets):.1%}), and is the fastest {regrets.count(0)} times. Of "
        "rows that are predicted alike (other kernels, AsyncTP) the fastest measured one counts."
    )
    rows = [[*map(str, row[:-1]), f"{row[-1]:.1%}"] for row in found]
    return [text, markdown_table(("model", "GPUs", "layouts", "predicted fastest", "measured fastest", "regret"), rows)]


def regrets_of(records: Sequence[Row]) -> list[tuple[str, int, int, str, str, float]]:
    """A row per model, GPUs, positions and dtype of which a source measured several layouts: their number, the variants
    that are predicted and measured to be fastest, and how much longer the former takes than the latter, measured.
    """
    groups: dict[tuple[Any, ...], dict[float, tuple[float, str]]] = {}
    for row in records:
        if row["predicted"] is not None:
            tokens, dtype = (row["predicted"][name] for name in ("tokens", "matrix_dtype"))
            alike = groups.setdefault((row["source"], row["what"], row["gpus"], row["positions"], dtype), {})
            predicted_s, measured = row["predicted"]["time_s"] / tokens, (row["measured_s"] / tokens, row["variant"])
            alike[predicted_s] = min(measured, alike.get(predicted_s, measured))
    found = []
    for (_, what, gpus, *_), layouts in groups.items():
        chosen_s, chosen = layouts[min(layouts)]
        best_s, best = min(layouts.values())
        if len(layouts) > 1:
            found.append((what, gpus, len(layouts), chosen, best, chosen_s / best_s - 1))
    return found


COLUMNS: Formats = {
    "model": "{what}",
    "variant": "{variant}",
    "GPUs": "{gpus}",
    "positions": "{positions}",
    "measured s": "{measured_s:.3g}",
    "predicted s": "{predicted[time_s]:.3g}",
    "error": "{error:+.0%}",
    "MFU": "{predicted[mfu]:.0%}",
    "exposed": lambda row: f"{row['predicted']['exposed_s'] / row['predicted']['time_s']:.0%}",
    "GiB": lambda row: "" if row["measured_bytes"] is None else (
        f"{row['measured_bytes'] / 2**30:.0f} / {row['predicted']['memory_bytes'] / 2**30:.0f}"
    ),
}  # fmt: skip
"""The columns of rows with a prediction."""


def rates_of(rates: Sequence[Sequence[float]]) -> str:
    """What attention reaches in torchtitan's rows, if all else is as predicted."""
    measured, predicted = (", ".join(f"{each / 1e12:.0f}" for each in column) for column in zip(*rates, strict=True))
    return (
        f"If all else is as predicted, attention reaches {measured} TFLOP/s per GPU in the rows on 8 GPUs with CP, "
        f"and {predicted} in the predictions."
    )


def otherwise_of(rows: Sequence[Row]) -> str:
    """What errors would be if something that the table does not say is otherwise."""
    errors = [f"{row['other_error']:+.0%}" for row in rows if row["other_error"] is not None]
    return f"{OTHERWISE[rows[0]['source']]}, errors would be {' and '.join(errors)}." if errors else ""


def left_out_of(rows: Sequence[Row]) -> str:
    """Which rows have no prediction, and why."""
    counts = Counter(row["reason"] for row in rows)
    found = "; ".join(f"{count} rows, {reason}" for reason, count in counts.items())
    return f"Not predicted: {found}." if found else ""


if __name__ == "__main__":
    main()
