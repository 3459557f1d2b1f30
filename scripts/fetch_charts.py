"""Fetch the charting library of the report page with npm, and check its checksums.

    python scripts/fetch_charts.py          # writes src/forgetless/report/vendor
    python scripts/fetch_charts.py --check  # only compares the present files with the checksums

A page opens from disk without a network, so the package contains the library: Observable Plot and
D3, on which it depends, as published by their authors, each with its licence.
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "forgetless" / "report" / "vendor"

# File here → package, version, file in the package, SHA-256.
FILES = {
    "d3.min.js": (
        "d3@7.9.2",
        "package/dist/d3.min.js",
        "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
    ),
    "d3.LICENSE": (
        "d3@7.9.2",
        "package/LICENSE",
        "2a6d2d5f32ba0b755ddbc1c833f766e30cdbe6ebe9a6d4e3e24427721f0b63d3",
    ),
    "plot.umd.min.js": (
        "@observablehq/plot@0.6.17",
        "package/dist/plot.umd.min.js",
        "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
    ),
    "plot.LICENSE": (
        "@observablehq/plot@0.6.17",
        "package/LICENSE",
        "4b295e011e0e046170041b5b46f1349393aeceb95797793a55bd21dbb543363a",
    ),
}


def differing() -> list[str]:
    """The files that are missing or differ from the table."""
    return [
        name
        for name, (_, _, sha256) in FILES.items()
        if not (VENDOR / name).is_file()
        or hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() != sha256
    ]


def fetch() -> None:
    """Extract the files from the published packages."""
    VENDOR.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for package in sorted({package for package, _, _ in FILES.values()}):
            run = ["npm", "pack", "--silent", package]
            done = subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True)
            with tarfile.open(Path(folder) / done.stdout.split()[-1]) as archive:
                for name, (source, member, _) in FILES.items():
                    content = archive.extractfile(member) if source == package else None
                    if content is not None:
                        (VENDOR / name).write_bytes(content.read())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not fetch")
    if not parser.parse_args().check:
        fetch()
    if wrong := differing():
        sys.exit(f"not the files that were reviewed: {', '.join(wrong)}")
    print(f"{len(FILES)} files in {VENDOR} match the checksums")
