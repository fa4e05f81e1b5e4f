"""The accuracy report: measured tables beside their predictions.

A table is never used to fit the constants that predict it: these are from documents or from other measurements. There
is a module for each kind of table, `collective`, `layer` and `kernel`, which judges it, and one report for all.
"""

from tasp_lab.measure.accuracy.collective import message_parts
from tasp_lab.measure.accuracy.judged import CollectiveAccuracy, MeasuredRow, SizeRow, TableAccuracy
from tasp_lab.measure.accuracy.report import AccuracyReport, accuracy, judge, own_tables

__all__ = [
    "AccuracyReport",
    "CollectiveAccuracy",
    "MeasuredRow",
    "SizeRow",
    "TableAccuracy",
    "accuracy",
    "judge",
    "message_parts",
    "own_tables",
]
