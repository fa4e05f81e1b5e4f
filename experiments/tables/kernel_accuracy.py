"""How well times of attention kernels are predicted, on rows that did not fit the constants that predict them.

``python -m experiments.tables.kernel_accuracy`` writes ``experiments/results/kernel_accuracy.md`` and ``.json``; it
takes some minutes. What a GPU without tables gets comes first: each kernel is predicted from the constants of other
GPUs, by data sheets and the design of the kernel. Then, per GPU, kernel and pass: with two tables or more, each table
is predicted from the others; with one, every second row from the rest. Tables of eager calls have the host's share in
them: they are predicted from tables of kernel times and reported apart; where a header ``backward: adds gradients``
states it, with the kernels that add gradients to those of the call before. Beside each error stands that of one
constant rate, the median of the rows that fitted. Constants shipped with tasp-lab are fitted to all rows and judge
nothing here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import RESULTS, Formats, Record, markdown_table, table, write_record
from experiments.tables.kernel_fits import LINEAR_KERNELS, kernel_tables, split_alternately
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import ProfileError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress
from tasp_lab.machines.kernel_model.catalogue import borrowed_kernel
from tasp_lab.machines.kernel_model.constants import Gpu, Passing, gpus
from tasp_lab.machines.kernel_model.kernel import bound_s, call_parts, nearest_variant
from tasp_lab.measure.calibrate_kernels import KernelTime, fit_kernel
from tasp_lab.measure.readers.kernel_table import KernelTable

_LEAST_ROWS = 4
_WITHIN = 0.12


class Judged(NamedTuple):
    """Rows of one table, predicted from others."""

    gpu: str
    kernel: str
    passing: str
    table: str
    fitted_to: str
    timing: str
    rows: list[KernelTime]
    predicted_s: list[float]
    constant_s: list[float]

    @property
    def errors(self) -> FloatArray:
        return np.asarray(np.array(self.predicted_s) / [row.time_s for row in self.rows] - 1)

    @property
    def constant_errors(self) -> FloatArray:
        return np.asarray(np.array(self.constant_s) / [row.time_s for row in self.rows] - 1)


Groups = dict[tuple[str, str, Passing], dict[str, list[KernelTime]]]


def groups(tables: Iterable[KernelTable], timing: str) -> Groups:
    """Rows of one call each, by GPU, kernel and pass, then table."""
    found: Groups = defaultdict(dict)
    for measured in tables:
        for row in measured.rows:
            if (
                measured.timing == timing
                and len(row.shapes) == 1
                and row.gpu in gpus()
                and row.kernel not in LINEAR_KERNELS
            ):
                key = row.gpu, row.kernel, row.shapes[0].passing
                found[key].setdefault(Path(measured.name).stem, []).append(
                    KernelTime(row.shapes[0], row.measured_s, measured.name)
                )
    return dict(found)


def judge(
    key: tuple[str, str, Passing], fit: Sequence[KernelTime], test: Sequence[KernelTime], names: tuple[str, str, str]
) -> Judged:
    """Predict `test` from a fit to `fit`."""
    gpu, kernel, passing = key
    variants = fit_kernel(gpus()[gpu], kernel, passing, fit, names[1]).variants
    predicted = [
        call_parts(gpus()[gpu], nearest_variant(variants, passing, row.shape.head_dim), row.shape).time_s
        for row in test
    ]
    return Judged(gpu, kernel, passing, *names, list(test), predicted, _at_one_rate(fit, test))


def _at_one_rate(fit: Sequence[KernelTime], test: Sequence[KernelTime]) -> list[float]:
    rate = float(np.median([row.shape.flops / row.time_s for row in fit]))
    return [row.shape.flops / rate for row in test]


def kept_aside(tables: Sequence[KernelTable]) -> Iterator[Judged]:
    """Each table from the others, or every second row where there is only one."""
    for key, by_table in sorted(groups(tables, "kernel").items()):
        for name, rows in by_table.items():
            others = [row for other, each in by_table.items() if other != name for row in each]
            if len(others) >= _LEAST_ROWS:
                yield judge(key, others, rows, (name, ", ".join(each for each in by_table if each != name), "kernel"))
            elif len(by_table) == 1 and len(rows) >= 2 * _LEAST_ROWS:
                fit, test = split_alternately(rows)
                yield judge(key, fit, test, (name, "every second row", "kernel"))


def eager(tables: Sequence[KernelTable]) -> Iterator[Judged]:
    """Tables of eager calls, from all tables of kernel times of the same kernel."""
    of_kernels = groups(tables, "kernel")
    adding = {Path(each.name).stem for each in tables if each.headers.get("backward") == "adds gradients"}
    for key, by_table in sorted(groups(tables, "eager").items()):
        fit = [row for rows in of_kernels.get(key, {}).values() for row in rows]
        for name, rows in by_table.items():
            if len(fit) >= _LEAST_ROWS:
                found = judge(key, fit, rows, (name, ", ".join(of_kernels[key]), "eager"))
                if name in adding and key[2] == "backward":
                    times = zip(found.predicted_s, rows, strict=True)
                    found = found._replace(
                        predicted_s=[time_s + _adding_s(gpus()[key[0]], row) for time_s, row in times]
                    )
                yield found


def _adding_s(gpu: Gpu, row: KernelTime) -> float:
    """Each gradient of 16 bit is read, added to another and written (AccumulateGrad of torch.autograd)."""
    shape = row.shape
    head = 3 * 2 * shape.batch * shape.head_dim
    of_keys_s = bound_s(gpu, head * shape.kv_heads * shape.keys)
    return bound_s(gpu, head * shape.heads * shape.queries) + 2 * of_keys_s


def left_out(tables: Sequence[KernelTable]) -> Iterator[Judged]:
    """Kernels of a GPU whose tables of this kernel were left out: constants of a relative, scaled by data sheets."""
    for key, by_table in sorted(groups(tables, "kernel").items()):
        gpu, kernel, _ = key
        try:
            model = borrowed_kernel(gpu, kernel)
        except ProfileError:
            continue
        for name, rows in by_table.items():
            predicted = [model.time_s(row.shape) for row in rows]
            yield Judged(*key, name, model.note, "kernel", rows, predicted, _at_one_rate(rows, rows))


def summary(found: Sequence[Judged]) -> dict[str, float]:
    """Shares of absolute relative errors, of all rows of all tables."""
    errors = np.abs(np.concatenate([each.errors for each in found]))
    constant = np.abs(np.concatenate([each.constant_errors for each in found]))
    short = np.concatenate([[row.shape.queries <= 4096 for row in each.rows] for each in found]).astype(bool)
    return {
        "rows": len(errors),
        "mean": errors.mean(),
        "median": float(np.median(errors)),
        "within_12": float((errors <= _WITHIN).mean()),
        "quantile_90": float(np.quantile(errors, 0.9)),
        "worst": errors.max(),
        "one_rate_mean": constant.mean(),
        "one_rate_median": float(np.median(constant)),
        "mean_to_4096_queries": errors[short].mean() if short.any() else float("nan"),
        "one_rate_mean_to_4096_queries": constant[short].mean() if short.any() else float("nan"),
    }


_SUMMARY: Formats = {
    "rows": "{rows:.0f}", "mean": "{mean:.1%}", "median": "{median:.1%}", "90 % within": "{quantile_90:.1%}",
    "rows within 12 %": "{within_12:.1%}", "worst": "{worst:.1%}", "one rate: mean": "{one_rate_mean:.1%}",
    "one rate: median": "{one_rate_median:.1%}",
}  # fmt: skip


def _worst(found: Sequence[Judged], count: int) -> list[list[str]]:
    rows = [(error, each, row) for each in found for error, row in zip(each.errors, each.rows, strict=True)]
    rows.sort(key=lambda entry: -abs(entry[0]))
    return [
        [
            f"{each.gpu} {each.kernel} {each.passing}",
            each.table,
            _shape_text(row),
            f"{row.time_s * 1e6:.4g}",
            f"{error:+.0%}",
        ]
        for error, each, row in rows[:count]
    ]


def _shape_text(row: KernelTime) -> str:
    shape = row.shape
    mask = "causal" if shape.low > 1 - shape.keys else "full"
    return f"{shape.batch} x {shape.heads}/{shape.kv_heads} x {shape.head_dim}, {shape.queries} x {shape.keys} {mask}"


def document(kept: Sequence[Judged], hosts: Sequence[Judged], relatives: Sequence[Judged]) -> str:
    """The report in Markdown."""
    parts = ["# Times of attention kernels", (__doc__ or "").split("\n\n", 1)[1].strip()]
    every = {
        "kernels of a GPU whose tables were left out": relatives,
        "rows kept aside, other tables of the GPU known": kept,
    }
    parts.append(
        table(({"what": what, **summary(each)} for what, each in every.items()), {"all": "{what}", **_SUMMARY})
    )
    columns = {"GPU, kernel, pass": "{gpu} {kernel} {pass}", "table": "{table}", "from": "{fitted_to}", **_SUMMARY}
    for title, found in (
        ("## Kernels of a GPU whose tables were left out", relatives),
        ("## Rows kept aside", kept),
        ("## Eager calls: the host's share is in what was measured", hosts),
    ):
        parts += [title, table(map(_record, found), columns)]
    parts += ["## The worst rows kept aside"]
    parts.append(
        markdown_table(
            ["GPU, kernel, pass", "table", "batch x heads x head dim, shape", "us", "error"], _worst(kept, 25)
        )
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _record(each: Judged) -> Record:
    rows = zip(each.rows, each.predicted_s, strict=True)
    return {
        "gpu": each.gpu, "kernel": each.kernel, "pass": each.passing, "table": each.table, "fitted_to": each.fitted_to,
        "timing": each.timing, **summary([each]),
        "measured_and_predicted_s": [[_shape_text(row), row.time_s, predicted_s] for row, predicted_s in rows],
    }  # fmt: skip


def main() -> None:
    tables = kernel_tables()
    kept = []
    for each in kept_aside(tables):
        print_progress(f"{each.gpu} {each.kernel} {each.passing} {each.table}: {np.abs(each.errors).mean():.1%}")
        kept.append(each)
    hosts, relatives = list(eager(tables)), list(left_out(tables))
    write_whole(RESULTS / "kernel_accuracy.md", document(kept, hosts, relatives).encode())
    every = {"kept_aside": kept, "eager": hosts, "left_out": relatives}
    found = {name: [_record(each) for each in part] for name, part in every.items()}
    write_record(RESULTS / "kernel_accuracy.json", {"all": summary(kept), **found})


if __name__ == "__main__":
    main()
