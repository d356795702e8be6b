"""The report: one HTML file of a database, which needs nothing beside it and no network."""

from autoflash.report.beside import Beside, read_results
from autoflash.report.page import page

__all__ = ["Beside", "page", "read_results"]
