"""The report: traces as one HTML page that opens from disk."""

from forgetless.report.page.page import build_page, write_page
from forgetless.report.page.words import headline

__all__ = ["build_page", "headline", "write_page"]
