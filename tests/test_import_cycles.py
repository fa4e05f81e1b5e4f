"""No module imports itself by way of others, imports for types included."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]


def import_graph(root: Path = ROOT) -> nx.DiGraph[str]:
    """An arc from each module of the product to each that it imports, at its top, in a function or for types."""
    files = {
        _name(path, root): path for package in ("tasp_lab", "sim", "runtime") for path in (root / package).rglob("*.py")
    }
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        graph.add_edges_from((name, other) for other in _imported(path, files) if other != name)
    return graph


def _name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, modules: Container[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            imported = {name if name in modules else str(node.module) for name in names}
            yield from (name for name in imported if name in modules)


def cycles(graph: nx.DiGraph[str]) -> list[frozenset[str]]:
    return [frozenset(component) for component in nx.strongly_connected_components(graph) if len(component) > 1]


def test_a_cycle_by_way_of_a_function_is_seen(tmp_path: Path) -> None:
    for package in ("tasp_lab", "sim", "runtime"):
        (tmp_path / package).mkdir()
    (tmp_path / "sim" / "one.py").write_text("from sim.two import work\n")
    (tmp_path / "sim" / "two.py").write_text("def work():\n    from sim import one\n    return one\n")
    (tmp_path / "sim" / "three.py").write_text("import sim.one\n")
    assert cycles(import_graph(tmp_path)) == [frozenset({"sim.one", "sim.two"})]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert [sorted(cycle) for cycle in cycles(import_graph())] == []
