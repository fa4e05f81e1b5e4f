"""Record which functions of our own packages run during one command; a script for a process of its own.

``python -P structure_walk.py '{"task": "command", "root": ..., "packages": [...], ...}'`` prints one JSON
object.
Only modules of the standard library are imported before the recording begins, so that imports of the command are
recorded, and so that the command can be that of another checkout. `structure` starts these processes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

Function = tuple[str, str]
"""Module and qualified name of a function."""


class Recorder:
    """Functions of some packages that run.

    Bodies of classes, lambdas and comprehensions count as functions; bodies of modules do not.
    """

    def __init__(self, root: str, packages: Sequence[str]) -> None:
        self.functions: set[Function] = set()
        self._prefixes = tuple(os.path.join(root, package.replace(".", os.sep), "") for package in packages)
        self._root = os.path.join(root, "")
        self._known: dict[CodeType, Function | None] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record all that runs in this thread and in threads that it starts."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            self._known[code] = self._function(code)
        function = self._known[code]
        if function is not None:
            self.functions.add(function)

    def _function(self, code: CodeType) -> Function | None:
        if not code.co_filename.startswith(self._prefixes) or code.co_name == "<module>":
            return None
        module = code.co_filename.removeprefix(self._root).removesuffix(".py").replace(os.sep, ".")
        return module.removesuffix(".__init__"), code.co_qualname

    def figures(self) -> dict[str, Any]:
        """Numbers of distinct functions, modules and packages."""
        modules = {module for module, _ in self.functions}
        return {
            "functions": len(self.functions),
            "modules": len(modules),
            "packages": len({module.rpartition(".")[0] for module in modules}),
        }


def run_command(cli: str, arguments: Sequence[str]) -> None:
    """Run the command line in this process, without its output."""
    module, _, name = cli.partition(":")
    main: Callable[[Sequence[str]], None] = getattr(importlib.import_module(module), name)
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        main(arguments)


def walk_command(asked: dict[str, Any]) -> dict[str, Any]:
    """The functions that run for a command, from the first import to the last line of output."""
    recorder = Recorder(asked["root"], asked["packages"])
    with recorder.recording():
        run_command(asked["cli"], asked["arguments"])
    return recorder.figures()


def walk_attention(asked: dict[str, Any]) -> dict[str, Any]:
    """The functions that run on one rank for attention, forward and backward, in its first call."""
    import torch
    import torch.distributed as dist

    attention = getattr(importlib.import_module(asked["runtime"]), "attention")  # noqa: B009
    dist.init_process_group(
        "gloo", init_method=f"file://{asked['store']}", rank=asked["rank"], world_size=asked["ranks"]
    )
    q, k, v = (torch.randn(1, 64, 8, 64, requires_grad=True) for _ in range(3))
    recorder = Recorder(asked["root"], asked["packages"])
    with recorder.recording():
        attention(q, k, v, schedule="tasp", causal=True).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return recorder.figures()


def count_simulations(asked: dict[str, Any]) -> dict[str, Any]:
    """How often a command simulates a schedule, and the processor time that it takes."""
    module, _, name = asked["simulate"].partition(":")
    simulator = importlib.import_module(module)
    simulate = getattr(simulator, name)
    count = 0

    def counted(*arguments: object, **options: object) -> object:
        nonlocal count
        count += 1
        return simulate(*arguments, **options)

    setattr(simulator, name, counted)  # before any other module imports the name
    begun_s = time.process_time()
    run_command(asked["cli"], asked["arguments"])
    return {"simulations": count, "cpu_s": time.process_time() - begun_s}


TASKS = {"command": walk_command, "attention": walk_attention, "simulations": count_simulations}

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    answer = TASKS[request["task"]](request)
    print(json.dumps(answer))
