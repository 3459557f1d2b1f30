"""Check what a wheel and a source distribution contain: all that they must, and nothing else.

.venv/bin/python scripts/check_dist.py dist
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parent.parent
LICENCES = ["LICENSE", *(f"src/forgetless/report/vendor/{n}.LICENSE" for n in ("d3", "plot"))]
# Of the source distribution, beside the package itself.
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
BESIDE |= {"SECURITY.md", "pyproject.toml", "setup.cfg", "setup.py"}


def faults(folder: Path) -> list[str]:
    """One line for each file too many or too few, and each link that leads nowhere."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/forgetless"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    package = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata.removesuffix("METADATA")
        page = Parser().parsestr(archive.read(metadata).decode())
    described = {info + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    described |= {info + "top_level.txt", *(f"{info}licenses/{name}" for name in LICENCES)}
    wanted = {name.removeprefix("src/") for name in package} | described
    with tarfile.open(source) as archive:
        inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    inside = {name for name in inside if ".egg-info/" not in name}
    found = [f"{wheel.name} lacks {name}" for name in wanted - names]
    found += [f"{wheel.name} has {name}" for name in names - wanted]
    found += [f"{source.name} lacks {name}" for name in (package | BESIDE) - inside]
    found += [f"{source.name} has {name}" for name in inside - package - BESIDE]
    links = re.findall(r"\]\(((?!https:)[^)]*)\)", str(page.get_payload()))
    return sorted(found) + [f"the description links to {link}" for link in links]


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]))
    sys.exit("\n".join(problems))
