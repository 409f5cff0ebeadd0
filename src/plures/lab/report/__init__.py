"""One page that shows the rows of a comparison: `plures report`."""

from plures.lab.report.page import write_report

__all__ = ["write_report"]
