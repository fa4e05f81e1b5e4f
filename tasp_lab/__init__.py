"""tasp-lab: the cost of ring and multi-ring collectives and attention on a machine, predicted, executed and compared.

The names in `__all__` are the public interface, together with the modules of `tasp_lab.topology` that build and edit
topologies. Each name is imported when it is first used, so ``import tasp_lab`` imports little.

>>> import tasp_lab
>>> len(tasp_lab.decompose("full-mesh:8").rings)
7
"""

from tasp_lab.core.lazy import ABOVE, lazy_names

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from tasp_lab.core.version import __version__
    from tasp_lab.machines.catalogue import load_machine
    from tasp_lab.measure.accuracy import accuracy
    from tasp_lab.measure.calibrate import calibrate
    from tasp_lab.measure.check import check, expected
    from tasp_lab.planning.plan import plan
    from tasp_lab.prediction.answer import Answer
    from tasp_lab.prediction.compare import compare
    from tasp_lab.prediction.decompose import decompose
    from tasp_lab.prediction.evaluate import answer, answers
    from tasp_lab.prediction.failures import failures
    from tasp_lab.prediction.layout import Layout
    from tasp_lab.prediction.predict import predict
    from tasp_lab.prediction.predict_step import predict_step
    from tasp_lab.prediction.question import Question
    from tasp_lab.study.check import check_study
    from tasp_lab.study.file import load_study
    from tasp_lab.study.run import run_study
    from tasp_lab.synthesis.search import search
    from tasp_lab.topology.graph import Topology
    from tasp_lab.validation.validate import validate
    from tasp_lab.workload.layer import Workload
    from tasp_lab.workload.models.catalogue import load_model

__all__ = [
    "predict",
    "predict_step",
    "plan",
    "Layout",
    "validate",
    "compare",
    "failures",
    "search",
    "decompose",
    "Question",
    "Answer",
    "answer",
    "answers",
    "load_machine",
    "load_study",
    "check_study",
    "run_study",
    "load_model",
    "Workload",
    "Topology",
    "check",
    "expected",
    "accuracy",
    "calibrate",
    "__version__",
]

ABOVE |= {
    "check options": "tasp_lab.schedules.attention.options:check_options",
    "draw timelines": "tasp_lab.plots.timelines:draw_timelines",
    "tabulate an answer": "tasp_lab.prediction.columns:answer_table",
    "schedule of .xml": "tasp_lab.formats.msccl_xml:spec",
    "schedule of .json": "tasp_lab.schedules.attention.program:spec",
    "schedules of a program": "tasp_lab.schedules.attention.program:built",
}

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "predict": "tasp_lab.prediction.predict",
        "predict_step": "tasp_lab.prediction.predict_step",
        "plan": "tasp_lab.planning.plan",
        "Layout": "tasp_lab.prediction.layout",
        "validate": "tasp_lab.validation.validate",
        "compare": "tasp_lab.prediction.compare",
        "failures": "tasp_lab.prediction.failures",
        "search": "tasp_lab.synthesis.search",
        "decompose": "tasp_lab.prediction.decompose",
        "Question": "tasp_lab.prediction.question",
        "Answer": "tasp_lab.prediction.answer",
        "answer": "tasp_lab.prediction.evaluate",
        "answers": "tasp_lab.prediction.evaluate",
        "load_machine": "tasp_lab.machines.catalogue",
        "load_study": "tasp_lab.study.file",
        "check_study": "tasp_lab.study.check",
        "run_study": "tasp_lab.study.run",
        "load_model": "tasp_lab.workload.models.catalogue",
        "__version__": "tasp_lab.core.version",
        "Workload": "tasp_lab.workload.layer",
        "Topology": "tasp_lab.topology.graph",
        "accuracy": "tasp_lab.measure.accuracy",
        "calibrate": "tasp_lab.measure.calibrate",
        "check": "tasp_lab.measure.check",
        "expected": "tasp_lab.measure.check",
    },
)
