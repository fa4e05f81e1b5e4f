"""A study as one page of HTML that needs no network: assumptions, findings, pictures, every point, every constant."""

from tasp_lab.study.report.page import StudyReport, report

__all__ = ["StudyReport", "report"]
