"""Follow every link of a built site: pages, anchors, pictures, downloads; nothing is remote.

.venv/bin/python scripts/check_site.py build/site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.links: list[str] = []
        self.loaded: list[str] = []  # by the browser, without a click
        self.anchors = {""}
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to, loads or names."""
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])


def broken(site: Path) -> list[str]:
    """One line for each link that leads nowhere."""
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    found = []
    for page in pages.values():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{page.file}: loads {link}")
                continue
            target = (page.file.parent / unquote(parts.path)).resolve() if parts.path else None
            target = target or page.file.resolve()
            anchors = pages[target].anchors if target in pages else {"", parts.fragment}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                found.append(f"{page.file}: {link} leads nowhere")
    return found


if __name__ == "__main__":
    problems = broken(Path(sys.argv[1]))
    sys.exit("\n".join(problems) or 0)
