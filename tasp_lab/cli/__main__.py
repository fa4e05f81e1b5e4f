"""``python -m tasp_lab.cli``, for torchrun."""

from tasp_lab.cli.process import main

main()
