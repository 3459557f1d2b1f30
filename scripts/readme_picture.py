"""Draw the picture of the README from the traces in results/table1."""

from pathlib import Path

from forgetless import load_trace
from forgetless.report import plot_accuracy

METHODS = ("sgd", "ewc", "a-gem", "ogd", "pca-ogd")

if __name__ == "__main__":
    traces = [load_trace(Path("results/table1/rotated-mnist") / method) for method in METHODS]
    plot_accuracy(traces).savefig("docs/images/rotated-mnist.png", dpi=110)
