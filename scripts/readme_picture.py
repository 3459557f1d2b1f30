"""Draw the picture of the README from the traces in results/table1."""

from forgetless.report.comparison import find_traces
from forgetless.report.plots import accuracy_matrices, save

if __name__ == "__main__":
    traces, _ = find_traces(["results/table1/rotated-mnist"])
    save(accuracy_matrices(traces, width=8.5, columns=5), "docs/images/rotated-mnist.png")
