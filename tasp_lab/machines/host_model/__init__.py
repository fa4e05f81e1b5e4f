"""Runtimes: what a library that runs layers takes on the host and on the GPU, apart from kernels and messages.

- `runtime`: the constants of a runtime; `catalogue`: runtimes by name, data files with sources.
- `issue_times`: when the host of each rank has issued each transfer and call.
"""
