"""``python -m tasp_lab.cli``, for torchrun."""

from tasp_lab.cli import main

main()
