"""The accuracy report: measured tables beside their predictions.

A table is never used to fit the constants that predict it: these are from documents or from other measurements. There
is a module for each kind of table, `collective`, `layer` and `kernel`, which predicts it, and one report for all.
"""

from tasp_lab.measure.accuracy.report import AccuracyReport, accuracy, evaluate, own_tables
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy

__all__ = [
    "AccuracyReport",
    "MeasuredRow",
    "TableAccuracy",
    "accuracy",
    "evaluate",
    "own_tables",
]
