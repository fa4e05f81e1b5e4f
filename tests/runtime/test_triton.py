"""The kernels of Triton without a GPU: their numbers by its interpreter, and machine code for five kinds of GPUs.

Both need a process of their own: Triton chooses the interpreter, and we the target, before kernels are made.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels import fused
from tests.runtime.test_fused import Sides, check_add, check_merge, check_special_rows, check_stand_in, sides
from tests.support.selection import IS_FULL, covering

pytest.importorskip("triton")

TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64))
"""A100, H100, B200, MI300X and MI355X, each with the threads of a warp."""


def in_a_process(function: str, **environment: str) -> None:
    code = f"from tests.runtime.test_triton import {function} as check; check()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=True, timeout=900)


def test_the_interpreter_computes_the_same() -> None:
    in_a_process("compare_in_the_interpreter", TRITON_INTERPRET="1")


def compare_in_the_interpreter() -> None:
    """Make the comparisons of `tests.runtime.test_fused`."""
    kernels = importlib.import_module("runtime.kernels.fused_triton")
    fused._triton_for = lambda _: kernels

    @given(sides(), st.booleans(), st.booleans())
    @settings(max_examples=40, deadline=None)
    def compare(case: Sides, empty: bool, rounded: bool) -> None:
        check_merge(case, empty)
        check_add(case, empty, rounded, most=2**-6)  # the interpreter cuts bf16 off, where it is to be rounded
        check_stand_in(case)

    compare()
    check_special_rows()


def test_every_kernel_compiles_for_every_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    in_a_process("compile_for_every_gpu", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


class Offline:
    """A driver of GPUs that are not there; every target is a device of its own, for which Triton compiles anew."""

    def __init__(self, device: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.device, self.target = device, GPUTarget(*TARGETS[device])

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for_every_gpu() -> None:
    """Compile what our launches ask for, with and without rows, empty and rounded, and look at the machine code."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    kernels: Any = importlib.import_module("runtime.kernels.fused_triton")
    out, part, lse = torch.zeros(4, 2, 3, 80), torch.zeros(4, 2, 3, 80, dtype=torch.bfloat16), torch.zeros(4, 2, 3)
    rows = torch.arange(4)
    for device, (backend, *_) in enumerate(TARGETS):
        driver.set_active(Offline(device))
        before = len(compiled)
        for at, empty in covering(product((None, rows), (False, True))):
            kernels.launch_merge(out, lse, part, lse, at, rows, empty)
            kernels.launch_add((part, part), (out, out), at, None, empty, True)
            kernels.launch_add((out,), (part,), rows, at, empty, False)
        kernels.launch_inner_products(part, part)
        kernels.launch_stand_in(part, lse)
        kernels.launch_copy(lse, lse, 2)
        rows_of_16, delta = torch.zeros(8, 2, 3, 80, dtype=torch.bfloat16), torch.zeros(8, 2, 3)
        for count in (8, 3):  # 48 and 18 heads
            kernels.launch_stand_in(rows_of_16[:count], delta[:count])
        assert compiled.pop() is compiled.pop(), "the number of rows alone makes no other kernel"
        binary = "cubin" if backend == "cuda" else "hsaco"
        assert len(compiled) - before == (15 if IS_FULL else 9)
        assert all(each.asm[binary].startswith(b"\x7fELF") for each in compiled[before:])
