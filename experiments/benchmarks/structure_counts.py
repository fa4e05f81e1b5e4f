"""Count the source of packages: lines, modules, importers, classes, cycles of imports.

>>> from pathlib import Path
>>> counts = count_source(Path("."), packages=("sim",))
>>> counts.modules > 0 and not counts.cycles_across_packages
True

Source is parsed, never imported, so that a checkout of another commit can be counted, too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import networkx as nx

Cycle = tuple[str, ...]
"""Names of modules that import each other, directly or through others of the cycle."""

DIRECTIVES = ("noqa", "type:", "fmt:", "pragma", "ruff:", "!")
"""What a comment begins with that is meant for a tool, not for a reader."""


class SourceCounts(NamedTuple):
    """What `count_source` counts."""

    lines: int
    modules: int
    single_importers: list[str]
    classes: int
    report_subclasses: list[str]
    to_dict: int
    cycles: list[Cycle]
    """Cycles of imports whose modules all lie in one package."""
    cycles_across_packages: list[Cycle]
    comment_share: float
    """Lines with a comment for a reader, as a share of all lines."""
    imports: list[int]
    """How many modules of these packages each module imports, in ascending order."""


def count_source(root: Path, packages: Sequence[str]) -> SourceCounts:
    """Count the modules of `packages`, which are folders or dotted names below `root`."""
    paths = {name: path for package in packages for name, path in modules_of(root, package)}
    texts = {name: path.read_text() for name, path in paths.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    folders = {name for name, path in paths.items() if path.name == "__init__.py"}
    statements = {name: set(imported_modules(name, tree, trees, folders)) for name, tree in trees.items()}
    importers = Counter(
        module for name, tree in trees.items() for module in (statements[name] | named_modules(tree, trees)) - {name}
    )
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    cycles = import_cycles(statements)
    inside = [cycle for cycle in cycles if len({package_of(name, packages) for name in cycle}) == 1]
    lines = sum(len(text.splitlines()) for text in texts.values())
    return SourceCounts(
        lines=lines,
        modules=len(texts),
        single_importers=sorted(name for name in texts if name not in folders and importers[name] <= 1),
        classes=len(classes),
        report_subclasses=subclasses_of("Report", classes),
        to_dict=sum(
            isinstance(node, ast.FunctionDef) and node.name == "to_dict"
            for tree in trees.values()
            for node in ast.walk(tree)
        ),
        cycles=inside,
        cycles_across_packages=[cycle for cycle in cycles if cycle not in inside],
        comment_share=sum(map(comment_lines, texts.values())) / max(lines, 1),
        imports=sorted(len(statements[name]) for name in trees if name not in folders),
    )


def modules_of(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    """``(dotted name, file)`` of each module of a package; a package has the name of its folder."""
    for path in sorted((root / package.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported_modules(name: str, tree: ast.AST, known: Mapping[str, object], folders: set[str]) -> Iterator[str]:
    """The known modules that a module imports: at its top, in functions, for type checkers only, or by
    ``import_module("their name")``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # a relative import: one level is the package of the module
                above = name.split(".")
                parents = above[: len(above) - node.level + (name in folders)]
                base = ".".join([*parents, *filter(None, [node.module])])
            # "from package import name" imports the module package.name, if there is one.
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            targets = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        else:
            continue
        yield from (target for target in targets if target in known and target != name)


def named_modules(tree: ast.AST, known: Mapping[str, object]) -> set[str]:
    """The known modules whose dotted names are strings of a module, as in the registry "sim.array.engine:run"."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    names = (text.partition(":")[0] for text in texts if "." in text)
    return {name for name in names if name in known}


def import_cycles(imports: Mapping[str, Iterable[str]]) -> list[Cycle]:
    """The strongly connected components of two or more modules, the largest first."""
    graph = nx.DiGraph((name, target) for name, targets in imports.items() for target in targets)
    cycles = (tuple(sorted(part)) for part in nx.strongly_connected_components(graph) if len(part) > 1)
    return sorted(cycles, key=lambda cycle: (-len(cycle), cycle))


def package_of(name: str, packages: Sequence[str]) -> str:
    """The package of a module that a reader would name: two levels of ``tasp_lab.schedule.model``, one of ``sim``."""
    root = next(package for package in packages if name == package or name.startswith(f"{package}."))
    below = name.removeprefix(root).strip(".").split(".")
    return f"{root}.{below[0]}" if len(below) > 1 else root


def subclasses_of(base: str, classes: Iterable[ast.ClassDef]) -> list[str]:
    """Names of all classes that name `base` among their bases, plain or as ``module.Base[int]``."""
    names = {
        node: {ast.unparse(parent).partition("[")[0].rpartition(".")[2] for parent in node.bases} for node in classes
    }
    return sorted(node.name for node, bases in names.items() if base in bases)


def comment_lines(text: str) -> int:
    """How many lines have a comment that is meant for a reader."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
    return sum(bool(comment) and not comment.startswith(DIRECTIVES) for comment in comments)


def count_lines(root: Path, folder: str) -> int:
    """Lines of all Python files below a folder."""
    return sum(len(path.read_text().splitlines()) for path in (root / folder).rglob("*.py"))


def count_words(root: Path, documents: Sequence[str]) -> int:
    """Words, which are what spaces separate, of all files that these patterns match."""
    paths = {path for pattern in documents for path in root.glob(pattern)}
    return sum(len(re.findall(r"\S+", path.read_text())) for path in paths)
