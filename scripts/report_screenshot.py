"""Make the screenshot of the report page in the docs, from the traces in results/table1.

    .venv/bin/python scripts/report_screenshot.py [RUNS]

Needs Debian's chromium.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from forgetless.cli.report import make_report
from forgetless.report.comparison import find_traces

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1180, 1200


def shoot(page: Path, picture: Path) -> None:
    """Save a screenshot of the top of a page."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
    subprocess.run(["chromium", *flags, *size, page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", nargs="?", default="results/table1/rotated-mnist", help="folder of the runs"
    )
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "report.html"), Path(folder, "shot.png")
        make_report(find_traces([parser.parse_args().runs])[0], page)
        shoot(page, shot)
        Image.open(shot).convert("RGB").save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")
