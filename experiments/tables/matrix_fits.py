"""How the time of matrix products depends on their shape: ``python -m experiments.tables.matrix_fits`` fits the form of
``tasp_lab/prediction/training_step/products.py`` to the tables in ``experiments/published/matrices``, and writes
``products.toml`` beside it and ``experiments/results/matrix_accuracy.md``.

Errors are those of shapes that did not fit the form: of three rows in a table, the results and both gradients of one
matrix, every second three are left out, then the others. The constants that ship are fitted to all rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from experiments.common import RESULTS, markdown_table
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.files import write_whole
from tasp_lab.machines.kernel_model.constants import gpus
from tasp_lab.machines.kernel_model.kernel import throttled
from tasp_lab.prediction.training_step import products
from tasp_lab.prediction.training_step.products import LARGE, Form, call_s, parts_s
from tasp_lab.workload.kernel_shapes import Product, ProductKind

FOLDER = Path(__file__).parents[1] / "published" / "matrices"
GPUS = ("a100-pcie", "b200")
LIMITED = ("b200",)
"""GPUs whose power limits large shapes, in these tables."""

_KINDS: dict[tuple[str, str], ProductKind] = {
    ("TN", "bf16"): "results", ("NN", "bf16"): "inputs", ("NT", "bf16"): "weights", ("NT", "fp32"): "sums",
}  # fmt: skip
_LARGE_FLOPS = 8e11
"""FLOPs of shapes whose benchmarks were long on either GPU."""


class Fit(NamedTuple):
    """A form, and the FLOP/s of results of full waves."""

    form: Form
    rate: float

    def times_s(self, gpu: str, rows: pd.DataFrame) -> FloatArray:
        """The times of a benchmark of these rows, an array (rows,)."""
        form, kinds = self.form, self.form.kinds
        rate = self.rate * rows.kind.map(kinds).to_numpy()
        m, k, n = (rows[name].to_numpy(dtype=float) for name in ("m", "k", "n"))
        busy_s, moved_s = parts_s(form, gpus()[gpu], rate, m, k, n, (rows.kind == "sums").to_numpy())
        busy_s = np.array([throttled(each * form.sustained, form.sustained, form.settle_s) for each in busy_s])
        return np.asarray(form.launch_s + np.maximum(busy_s, moved_s))

    def large_rate(self, gpu: str) -> float:
        """FLOP/s of results of a `LARGE` product in long use."""
        large = Product(LARGE, LARGE, LARGE, "results")
        return large.flops / call_s(self.form, gpus()[gpu], self.rate, large)


def read(gpu: str) -> pd.DataFrame:
    """The rows of a GPU, with their kinds, FLOPs and seconds."""
    rows = pd.read_csv(FOLDER / f"{gpu}.csv", comment="#")
    rows["kind"] = [_KINDS[each] for each in zip(rows.layout, rows.out_dtype, strict=True)]
    rows["flops"] = 2.0 * rows.m * rows.k * rows.n
    rows["time_s"] = rows.flops / (1e12 * rows.tflops)
    return rows


def fitted(gpu: str, rows: pd.DataFrame) -> Fit:
    """The form that fits rows best: by the logarithm of times, robust to those that no form explains.

    Full clocks are those of the fastest row, settled ones those of the median of large rows.
    """
    kinds = [each for each in _KINDS.values() if each in set(rows.kind)]
    sustained = float(rows.tflops[rows.flops > _LARGE_FLOPS].median() / rows.tflops.max()) if gpu in LIMITED else 1.0

    def fit_of(logs: FloatArray) -> Fit:
        rates, (depth, loads, launch_us, settle_ms) = np.exp(logs[: len(kinds)]), np.exp(logs[len(kinds) :])
        shares = dict(zip(kinds, (rates / rates[0]).tolist(), strict=True))
        shares.setdefault("weights", shares["sums"])
        settle_s = float(settle_ms * 1e-3) if sustained < 1 else 0.0
        form = Form("fit", shares, float(depth), float(loads), float(launch_us * 1e-6), sustained, settle_s)
        return Fit(form, float(rates[0]))

    measured = rows.time_s.to_numpy()
    start = [np.quantile(rows.tflops, 0.7) * 1e12] * len(kinds) + [64, 0.05, 3, 0.3]

    def residuals(logs: FloatArray) -> FloatArray:
        return np.asarray(np.log(fit_of(logs).times_s(gpu, rows) / measured))

    found = least_squares(residuals, np.log(start), loss="soft_l1", f_scale=0.05)
    return fit_of(found.x)


def errors_of(gpu: str, rows: pd.DataFrame) -> pd.Series:
    """The errors of all rows, each half predicted from the other."""
    half = rows.index // 3 % 2
    found = []
    for left_out in (0, 1):
        judged, fit = rows[half == left_out], fitted(gpu, rows[half != left_out])
        found.append(pd.Series(fit.times_s(gpu, judged) / judged.time_s.to_numpy() - 1, index=judged.index))
    return pd.concat(found).sort_index()


_STAGES: dict[str, ProductKind] = {"fwd": "results", "bwd_grad_act": "inputs", "bwd_grad_w": "sums"}


def experts_errors(gpu: str, fit: Fit, *, together: bool) -> pd.Series:
    """The errors of grouped products of experts, to which nothing is fitted but whether they run `together`."""
    rows = pd.read_csv(FOLDER / f"{gpu}_experts.csv", comment="#")
    form, errors = msgspec.structs.replace(fit.form, together=together), []
    for row in rows.itertuples():
        product = Product(row.m, row.k, row.n, _STAGES[row.stage], row.groups)
        errors.append(call_s(form, gpus()[gpu], fit.rate, product) * row.tflops * 1e12 / product.flops - 1)
    return pd.Series(errors)


def _source(gpu: str, rows: pd.DataFrame) -> str:
    head = (FOLDER / f"{gpu}.csv").read_text().splitlines()[0].removeprefix("# source: ")
    return f"fit to {len(rows)} shapes: {head}"


def _line(name: str, errors: pd.Series) -> list[str]:
    size = errors.abs()
    return [name, str(len(size)), *(f"{each:.1%}" for each in (size.median(), size.mean(), size.quantile(0.9))),
            f"{errors.median():+.1%}"]  # fmt: skip


def main() -> None:
    """Fit, judge and write."""
    shipped, lines = {}, []
    for gpu in GPUS:
        rows = read(gpu)
        errors, fit = errors_of(gpu, rows), fitted(gpu, rows)
        large = rows.flops > _LARGE_FLOPS
        lines += [_line(f"{gpu}, all", errors), _line(f"{gpu}, from 0.8 TFLOP on", errors[large])]
        lines += [_line(f"{gpu}, smaller", errors[~large])]
        lines += [_line(f"{gpu}, {kind}", errors[rows.kind == kind]) for kind in sorted(set(rows.kind))]
        experts = {together: experts_errors(gpu, fit, together=together) for together in (True, False)}
        together = bool(experts[True].abs().median() < experts[False].abs().median())
        lines += [_line(f"{gpu}, experts, {'together' if together else 'one after another'}", experts[together])]
        form = msgspec.structs.replace(fit.form, source=_source(gpu, rows), together=together)
        shipped[gpu] = _rounded(form)
        print(gpu, f"{fit.large_rate(gpu) / 1e12:.1f} TFLOP/s", msgspec.to_builtins(shipped[gpu]))
    document = msgspec.toml.encode(shipped)
    write_whole(
        Path(products.__file__).with_suffix(".toml"),
        b"# Made by python -m experiments.tables.matrix_fits.\n\n" + document,
    )
    table = markdown_table(["shapes", "rows", "median error", "mean", "9 of 10 within", "median, signed"], lines)
    write_whole(RESULTS / "matrix_accuracy.md", (_PAGE + table + "\n").encode())


def _rounded(form: Form) -> Form:
    numbers = {
        name: float(f"{getattr(form, name):.4g}") for name in ("depth", "loads", "launch_s", "sustained", "settle_s")
    }
    return msgspec.structs.replace(form, kinds={name: round(each, 4) for name, each in form.kinds.items()}, **numbers)


_PAGE = """# Matrix products by shape

Made by `python -m experiments.tables.matrix_fits`: time of products that did not fit the model, predicted over measured
(each half of the shapes from the other). Small shapes on B200 scatter by the state of its power limit: of neighbouring
sizes one runs at 880, the next at 1,430 TFLOP/s, which no shape explains.

"""

if __name__ == "__main__":
    main()
