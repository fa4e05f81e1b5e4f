"""Constants of attention kernels: ``python -m experiments.tables.kernel_fits`` fits them to the tables in
``tasp_lab/measure/tables/kernels`` and writes ``tasp_lab/machines/kernel_model/data/GPU/KERNEL.toml``. It takes some
minutes.
"""

from __future__ import annotations

from pathlib import Path

from tasp_lab.core.progress import print_progress
from tasp_lab.machines.kernel_model.constants import data_folder
from tasp_lab.measure.fit.kernel_files import fit_files, write_files
from tasp_lab.measure.readers.file_position import parse_csv, read_text
from tasp_lab.measure.readers.kernel_table import KernelTable, is_kernel_table, kernel_table

TABLES = Path(__file__).parents[2] / "tasp_lab" / "measure" / "tables" / "kernels"


def kernel_tables() -> list[KernelTable]:
    """All tables of kernels by shape."""
    contents = [parse_csv(read_text(path), str(path)) for path in sorted(TABLES.glob("*.csv"))]
    return [kernel_table(content) for content in contents if is_kernel_table(content)]


if __name__ == "__main__":
    write_files(fit_files(kernel_tables(), print_progress), data_folder())
