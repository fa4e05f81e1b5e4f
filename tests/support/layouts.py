"""The sequence layouts by name."""

from tasp_lab.workload.sequence_layout import contiguous, striped, zigzag

LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
