"""tasp-lab: the cost of ring and multi-ring collectives and attention on a machine, predicted, executed and compared.

The names in `__all__` are the public interface, together with the modules of `tasp_lab.topology` that build and edit
topologies. Each name is imported when it is first used, so ``import tasp_lab`` imports no other package.

>>> import tasp_lab
>>> len(tasp_lab.decompose("full-mesh:8").rings)
7
"""

from importlib import import_module

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from tasp_lab.analysis.accuracy import accuracy
    from tasp_lab.analysis.calibrate import calibrate
    from tasp_lab.analysis.compare import compare
    from tasp_lab.analysis.decompose import decompose
    from tasp_lab.analysis.predict import predict
    from tasp_lab.analysis.predict_step import predict_step
    from tasp_lab.analysis.validate import validate
    from tasp_lab.machines.catalogue import load_machine
    from tasp_lab.models.catalogue import load_model
    from tasp_lab.study.file import load_study
    from tasp_lab.topology.graph import Topology
    from tasp_lab.version import __version__
    from tasp_lab.workload.layer import Workload

__all__ = [
    "predict",
    "predict_step",
    "validate",
    "compare",
    "decompose",
    "load_machine",
    "load_study",
    "load_model",
    "Workload",
    "Topology",
    "accuracy",
    "calibrate",
    "__version__",
]

_MODULES = {
    "predict": "tasp_lab.analysis.predict",
    "predict_step": "tasp_lab.analysis.predict_step",
    "validate": "tasp_lab.analysis.validate",
    "compare": "tasp_lab.analysis.compare",
    "decompose": "tasp_lab.analysis.decompose",
    "load_machine": "tasp_lab.machines.catalogue",
    "load_study": "tasp_lab.study.file",
    "load_model": "tasp_lab.models.catalogue",
    "__version__": "tasp_lab.version",
    "Workload": "tasp_lab.workload.layer",
    "Topology": "tasp_lab.topology.graph",
    "accuracy": "tasp_lab.analysis.accuracy",
    "calibrate": "tasp_lab.analysis.calibrate",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
