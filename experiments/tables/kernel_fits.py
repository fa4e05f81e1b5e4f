"""Constants of attention kernels: ``python -m experiments.tables.kernel_fits`` fits them to the tables in
``tasp_lab/measure/tables/kernels`` and writes ``tasp_lab/machines/kernel_model/data/GPU/KERNEL.toml``. It takes some
minutes.
"""

from __future__ import annotations

from pathlib import Path

from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress
from tasp_lab.machines.kernel_model.constants import data_folder, gpus
from tasp_lab.machines.kernel_model.memory import LinearKernel, linear_document
from tasp_lab.measure.fit.fit_kernels import fit_linear_kernel
from tasp_lab.measure.fit.kernel_files import fit_files, write_files
from tasp_lab.measure.readers.file_position import read_text
from tasp_lab.measure.readers.kernel_table import KernelTable, is_kernel_table, read_kernel_table

TABLES = Path(__file__).parents[2] / "tasp_lab" / "measure" / "tables" / "kernels"


def kernel_tables() -> list[KernelTable]:
    """All tables of kernels by shape."""
    return [read_kernel_table(path) for path in sorted(TABLES.glob("*.csv")) if is_kernel_table(read_text(path))]


LINEAR = ("chunk-retention", "chunk-gla", "chunk-gdn")
"""Kernels of flash-linear-attention with rows of both passes on one known GPU."""


def fit_linear(tables: list[KernelTable]) -> bytes:
    """The file of kernels of linear attention."""
    kernels: list[LinearKernel] = []
    for name in LINEAR:
        rows = [(row, table) for table in tables for row in table.rows if row.kernel == name and row.gpu in gpus()]
        source = rows[0][1].headers["source"]
        kernels += fit_linear_kernel(name, gpus()[rows[0][0].gpu], [row for row, _ in rows], source)
    return linear_document(tuple(kernels))


if __name__ == "__main__":
    write_whole(data_folder() / "linear.toml", fit_linear(kernel_tables()))
    write_files(fit_files(kernel_tables(), print_progress), data_folder())
