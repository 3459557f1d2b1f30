"""The site, built by `make docs` with Sphinx from the pages in this folder."""

import os
import re
from dataclasses import fields, is_dataclass
from inspect import isclass
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

import forgetless

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "forgetless"
author = "The forgetless developers"
project_copyright = "The forgetless developers"
version = release = forgetless.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"forgetless {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = ">>> "

myst_heading_anchors = 4  # as GitHub makes them
suppress_warnings = ["myst.header"]  # a page that is included may begin with a lower heading

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True

default_role = "code"  # docstrings have `names` in single quotes, as Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_mock_imports = ["avalanche", "lightning", "transformers"]  # extras, slow to import
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
add_module_names = False

# No inventory of another project is downloaded, so that the site builds without a network; and
# signatures name classes that are no part of the interface, and so have no page.
OTHERS = (
    "torch numpy matplotlib rich avalanche lightning transformers collections typing pathlib os"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({OTHERS.replace(' ', '|')})(\..*)?"),
    ("py:class", r"forgetless\..*"),
    ("py:obj", r"forgetless\.methods\.base\.State"),
]

NOTEBOOK = """---
file_format: mystnb
kernelspec:
  name: python3
---
"""


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links that leave the folder into links of the site, and notebooks' Python into cells."""
    folder = (DOCS / docname).parent
    source[0] = relinked(source[0], folder, folder)
    if docname.startswith("notebooks/"):
        source[0] = NOTEBOOK + source[0].replace("```python\n", "```{code-cell}\n")


def read_included(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    """The same for the text of a file that a page includes."""
    content[0] = relinked(content[0], (DOCS / path).parent, (DOCS / app.env.docname).parent)


def relinked(text: str, written: Path, shown: Path) -> str:
    """A page's text with its relative links as seen from another folder.

    Arguments:
        text: Markdown.
        written: the folder that its links start from.
        shown: the folder of the page that shows it.
    """

    def link(match: re.Match[str]) -> str:
        path, _, heading = match[2].partition("#")
        if not path or ":" in path:
            return match[0]
        target = (written / path).resolve()
        target = PAGE_OF.get(target) or PAGE_OF.get(target / "README.md") or target
        place = os.path.relpath(target, shown) + (f"#{heading}" if heading else "")
        return f"{match[1]}({place})"

    return re.sub(r"(\])\(([^()\s]+)\)", link, text)


def _pages() -> dict[Path, Path]:
    """Each file that a page includes → the page."""
    found = {}
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"^```\{include\} (\S+)", page.read_text("utf-8"), re.M):
            found[(page.parent / name).resolve()] = page
    return found


PAGE_OF = _pages()


def before_napoleon(
    app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]
) -> None:
    """Escape what Sphinx would take for markup: the shape (*, T)."""
    lines[:] = [re.sub(r"(?<=[(, ])\*(?=[,)\w])", r"\\*", line) for line in lines]
    WRITTEN[name] = list(lines)


def after_napoleon(
    app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]
) -> None:
    """Restore an attribute's docstring, of which what precedes a colon was taken for a type."""
    if what in ("attribute", "property"):
        lines[:] = WRITTEN[name]


def signature_of_options(
    app: Sphinx, what: str, name: str, made: object, options: object, text: str, result: str
) -> tuple[str, str] | None:
    """A dataclass's options, where its interface would hide them."""
    if not isclass(made) or not is_dataclass(made):
        return None
    own = signature(made.__init__, bound_method=True)
    return stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), ""


WRITTEN: dict[str, list[str]] = {}


def describe_options(
    app: Sphinx, what: str, name: str, made: object, options: object, lines: list[str]
) -> None:
    """Options of a dataclass that its docstring leaves to their own help texts."""
    if not isclass(made) or not is_dataclass(made) or "Arguments:" in lines or not lines:
        return
    helped = {field.name: field.metadata.get("help") for field in fields(made)}
    entries = [f":param {name}: {text}" for name, text in helped.items() if text]
    if entries and not any(line.startswith(":param") for line in lines):
        lines += ["", *entries, ""]


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("autodoc-process-signature", signature_of_options)
    app.connect("autodoc-process-docstring", describe_options, priority=600)
