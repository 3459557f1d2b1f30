"""Use an installed forgetless as README says, in an environment that has nothing else.

    PYTHON -I scripts/smoke.py

Its two lines, its Python and a comparison are run; then the sizes of what was installed are
printed, and how long the imports take.
"""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXTRAS = "accelerate avalanche gguf lightning mlflow numba peft ray tensorboard transformers wandb"
BEGIN = """
import forgetless, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
loader = [(torch.randn(20, 4), torch.randint(0, 3, (20,)))]
def train():
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def run(*words: str, folder: str) -> str:
    """The output of a program, which must succeed."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def megabytes(name: str) -> float:
    """The size of an installed distribution."""
    files = importlib.metadata.files(name) or []
    return sum(Path(f.locate()).stat().st_size for f in files if Path(f.locate()).is_file()) / 1e6


def main() -> None:
    """Run what README shows, and print what was measured."""
    here = importlib.util.find_spec("forgetless")
    assert here is not None
    assert "site-packages" in str(here.origin), "a checkout is in the way"
    extras = [name for name in EXTRAS.split() if importlib.util.find_spec(name)]
    assert not extras, f"the core has brought {extras}"
    metadata = importlib.metadata.metadata("forgetless")
    readme = str(metadata.get_payload() or metadata["Description"])
    python = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    lines = re.findall(r"^    guard = .*?(?=\n\S)", readme, re.DOTALL | re.MULTILINE)
    assert len(python) == len(lines) == 1, "README has changed: so must this"
    two_lines = re.sub(r"^ {4}", "", lines[0], flags=re.MULTILINE)
    two_lines = two_lines.replace("…your loop, unchanged…", "train()")
    command = str(Path(sys.executable).with_name("forgetless"))
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-I", "-c", BEGIN + two_lines + "\ntrain()", folder=folder)
        for block in python:
            print(run(sys.executable, "-I", "-c", block, folder=folder).strip())
        version = metadata["Version"]
        assert version in run(command, "--version", folder=folder)
        run(command, "--help", folder=folder)
        compared = ["--tasks", "2", "--seeds", "1", "--epochs", "1", "--out", "demo"]
        run(command, "compare", "rotated-digits", "--methods", "sgd,ewc", *compared, folder=folder)
        page = Path(folder, "demo", "report.html").read_text("utf-8")
        assert "d3js.org" in page, "the page must have its scripts inside"
        print(run(command, "paper", "build", "--help", folder=folder).strip().splitlines()[0])
        seconds = {
            what: min(imported(what, folder) for _ in range(5))
            for what in ("import torch", "import forgetless", "from forgetless import Guard, fit")
        }
    names = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    sizes = sorted(((megabytes(name), name) for name in names), reverse=True)
    total = sum(size for size, _ in sizes)
    print(f"forgetless {version}: {megabytes('forgetless'):.1f} MB of {total:.0f} MB installed:")
    print("  " + ", ".join(f"{name} {size:.0f}" for size, name in sizes[:8]))
    for what, time in seconds.items():
        print(f"{what}: {time:.2f} s, {time / seconds['import torch']:.2f} × import torch")


def imported(what: str, folder: str) -> float:
    """Seconds that a statement takes in a new process, without Python's own start."""
    timed = f"import time; t = time.perf_counter(); {what}; print(time.perf_counter() - t)"
    return float(run(sys.executable, "-I", "-c", timed, folder=folder))


if __name__ == "__main__":
    main()
