"""The page of a release in a package index: README, whose links lead to the repository.

Links of README are relative, for those who read it in a checkout. An index knows no checkout, so
FORGETLESS_REPOSITORY, the repository's address, makes them absolute, to the files of this version.
Without it they become plain text, since a link that leads nowhere is worse than none.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def page(readme: str, repository: str | None, version: str) -> str:
    """README with no relative link.

    Arguments:
        readme: Markdown.
        repository: its address, such as https://github.com/owner/name; None if it is not known.
        version: tagged there as v0.0.0.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, words, link = match.groups()
        if link.startswith(("https:", "http:", "#")):
            return match[0]
        if not repository:
            return "" if picture else words
        place = f"{repository.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{link}"
        return f"{picture}[{words}]({place})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)", absolute, readme)


if __name__ == "__main__":
    source = (ROOT / "src/forgetless/support/provenance.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.M)[1]
    repository = os.environ.get("FORGETLESS_REPOSITORY")
    setup(
        long_description=page((ROOT / "README.md").read_text("utf-8"), repository, version),
        long_description_content_type="text/markdown",
        project_urls={"Repository": repository} if repository else {},
    )
