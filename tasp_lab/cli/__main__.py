"""``python -m tasp_lab.cli``, for torchrun."""

from tasp_lab.cli.main import main

main()
