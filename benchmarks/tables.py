"""The tables of results/bench/README.md, from the JSON that the benchmarks leave there.

    python benchmarks/tables.py

A test rebuilds the page and fails if it differs.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

FOLDER = Path(__file__).parent.parent / "results" / "bench"

INTRODUCTION = """\
# Benchmarks

Measured by `make bench` (two cores) and `make bench-gpu` (one H200). References and floors are
measured in the same run as what they are compared with. A floor is the bytes that must be read over
the measured bandwidth, or the operations over the measured rate. Times are medians, with the
smallest and the largest in brackets. The JSON beside this page has every repeat, but only medians
and ranges of what a guard costs and of the large model, and only medians of growth.
"""


def page(folder: Path = FOLDER) -> str:
    """The whole page."""
    read = {p.stem: json.loads(p.read_text("utf-8")) for p in sorted(folder.glob("*.json"))}
    parts = [INTRODUCTION]
    for title, names, build in (*SECTIONS, *WHERE_MEASURED):
        if all(name in read for name in names):
            parts.append(f"## {title}\n\n" + build(*(read[name] for name in names)))
    return "\n".join(parts)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def span(values: Sequence[float], factor: float = 1.0, digits: int = 2) -> str:
    """Median, and from smallest to largest."""
    low, middle, high = (factor * f(values) for f in (min, median, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def runs(gpu: dict[str, Any]) -> str:
    """Whole runs on a GPU."""
    rows = [
        [
            f"{run['scenario']}, {run['method']}",
            f"{run['seconds']:.1f}",
            *(f"{run['parts'][part]:.1f}" for part in ("training", "consolidation", "evaluation")),
            f"{sum(run['average_accuracy']) / len(run['average_accuracy']):.2f}",
        ]
        for run in gpu["runs"]
    ]
    headings = ["five seeds, protocol released", "seconds", "training", "consolidation"]
    versions = [run.get("versions", gpu["versions"]["runs"]) for run in gpu["runs"]]
    machines = sorted({f"{v['device']}, torch {v['torch']}" for v in versions})
    words = (
        f"\n{'; '.join(machines)}. From the configuration "
        "to the trace, data loading included. The first run on a machine compiles kernels, about "
        "six seconds, which are kept on its disk.\n"
    )
    return table([*headings, "evaluation", "A_T"], rows) + words


def gpu_projection(gpu: dict[str, Any]) -> str:
    """Projections on a GPU against two products and the floor."""
    rows = [
        [
            f"{case['dtype'].removeprefix('torch.')}, {case['rows']:,} rows",
            span(case["seconds"], 1e6, 0),
            f"{case['ratio']:.2f}",
            f"{median(case['seconds']) / median(case['reading']):.2f}",
            f"{median(case['two_products']) / median(case['seconds']):.2f}",
            f"{case['error']:.0e}",
        ]
        for case in gpu["projection"]
    ]
    headings = ["five seeds, 113,610 parameters", "µs", "× floor (one pass)", "× a sum of as much"]
    return table([*headings, "× faster than two products", "relative error"], rows)


def gpu_step(gpu: dict[str, Any]) -> str:
    """A training step, recorded and launched from Python."""
    kinds = [name.removesuffix(", recorded") for name in gpu["step"] if name.endswith("recorded")]
    rows = []
    for kind in kinds:
        recorded, launched = (gpu["step"][f"{kind}, {how}"] for how in ("recorded", "from Python"))
        ratio = median(launched) / median(recorded)
        rows.append([kind, span(recorded, 1e6, 0), f"{1e6 * median(launched):.0f}", f"{ratio:.1f}"])
    return table(["five seeds, batch 32", "recorded, µs", "from Python, µs", "ratio"], rows)


def guard(of: dict[str, Any]) -> str:
    """What a guard costs on one device."""
    rows = []
    for case in of["cases"]:
        row = [
            f"{case['model']}, {case['parameters']:,}",
            f"{case['directions']:,}",
            f"{case['overhead']:.2f} ({case['spread'][0]:.2f} to {case['spread'][1]:.2f})",
        ]
        if one := case.get("projection"):
            passes = "1 pass"
            if one["passes"] == 2:
                passes = f"2 passes, {2 * one['times_floor']:.2f} of 1"
            low, high = one["spread"]
            row += [
                f"{1e3 * one['ours_s']:.2f}",
                f"{one['times_floor']:.2f} ({low:.2f} to {high:.2f}) of {passes}",
                f"{one['columns_over_ours']:.1f}",
            ]
        rows.append(row + [""] * (6 - len(row)))
    headings = ["model, parameters", "directions", "step with guard ÷ without", "projection, ms"]
    words = (
        "\nThe floor is two passes over the rows where two of them do not fit the cache of a core "
        "(on a GPU, where its chips together do not hold one). A larger cache that cores share may "
        "spare some of the second: then less than 1 is possible.\n"
    )
    return table([*headings, "× floor", "× faster than columns"], rows) + words


def method_steps(of: dict[str, Any]) -> str:
    """What a step costs with methods whose memory does not grow."""
    rows = [
        [
            case["model"],
            case["method"],
            f"{1e3 * case['plain_s']:.1f}",
            f"{case['overhead']:.2f} ({case['spread'][0]:.2f} to {case['spread'][1]:.2f})",
        ]
        for case in of["cases"]
    ]
    words = f"\n{of['device']}, {of['threads']} thread{'s' if of['threads'] > 1 else ''}, "
    words += f"torch {of['versions']['torch']}; AdamW, batches of 32 (the transformer's 16 × 64).\n"
    headings = ["model", "method", "a step without guard, ms", "with guard ÷ without"]
    return table(headings, rows) + words


def end_task(of: dict[str, Any]) -> str:
    """What KronOGD's `end_task` costs."""
    rows = [
        [
            f"{case['model']}, {case['samples']:,} samples",
            f"{case['end_task_s']:.2f}",
            *(
                span(case[name])
                for name in ("times_pass", "without_eigh_times_pass", "times_floor")
            ),
        ]
        for case in of["cases"]
    ]
    headings = ["`end_task` of KronOGD", "seconds", "÷ a pass", "less eigenvectors, ÷ a pass"]
    words = (
        f"\n{of['device']}, {of['threads']} thread{'s' if of['threads'] > 1 else ''}, torch "
        f"{of['versions']['torch']}; on a CPU seconds of the processor. A pass is a forward "
        "and a backward pass of the same samples in batches of 64. The floor is a pass and "
        "the eigenvectors of the moments, whose time hardly depends on the number of samples. "
        f"Repeats: {min(len(case['times_pass']) for case in of['cases'])}.{of.get('note', '')}\n"
    )
    return table([*headings, "× floor"], rows) + words


def language(of: dict[str, Any]) -> str:
    """What the end of a task costs on a language model."""
    rows = [
        [
            f"{case['model']}, {case['method']}",
            f"{case['end_task_s']:.1f}",
            span(case["end_task_times_pass"]),
            span(case["loop_times_pass"]),
            f"{case['end_task_peak_bytes'] / case['kept_bytes']:.2f}",
            f"{case['loop_peak_bytes'] / case['kept_bytes']:.2f}",
        ]
        for case in of["cases"]
    ]
    headings = ["`end_task`", "seconds", "÷ a pass", "a loop ÷ a pass", "peak ÷ kept", "loop's"]
    words = (
        f"\nSeconds of the processor, {of['threads']} thread"
        f"{'s' if of['threads'] > 1 else ''}, torch {of['versions']['torch']}. Llamas with random "
        "weights and a tied vocabulary, 8 directions of 8 sequences of 32 tokens; a pass is a "
        "forward and a backward pass of the same batch. "
        "The loop takes one sample's gradient after the other, and the principal directions from "
        f"their Gram matrix.{of.get('note', '')}\n"
    )
    return table(headings, rows) + words


def consolidation(subspace: dict[str, Any], tangent: dict[str, Any]) -> str:
    """Factored projections, consolidation and Gram matrices on a CPU."""
    factored, summary = subspace["factored"], subspace["consolidation"]
    gram, top = tangent["gram"], tangent["top"]
    ours = median(gram["forgetless"]["seconds"])
    leading = median(top["forgetless"]["seconds"])
    rows = [
        [
            f"factored OGD, {factored['samples']:,} samples, one projection",
            span(factored["ours_s"], 1e3) + " ms",
            f"{factored['times_floor']:.1f}",
            f"{factored['columns_over_ours']:.1f} × dense columns",
        ],
    ]
    for name, ratio in summary["usual_over_ours"].items():
        seconds, floor = span(summary["ours_s"]) + " s", f"{summary['times_floor']:.1f}"
        what = "consolidation of 3,000 samples into 100 directions"
        rows.append([what, seconds, floor, f"{ratio:.1f} × a loop and {name}"])
    for name, other in gram.items():
        if name != "forgetless":
            ratio, floor = median(other["seconds"]) / ours, ours / tangent["floors"]["gram"]
            what = "Gram matrix of 3,000 samples"
            rows.append([what, f"{ours:.2f} s", f"{floor:.1f}", f"{ratio:.1f} × {name}"])
    for name, other in top.items():
        if name != "forgetless":
            ratio, floor = median(other["seconds"]) / leading, leading / tangent["floors"]["top"]
            what = "top 100 directions, features included"
            faster = f"{ratio:.1f} × {name} on ready features"
            rows.append([what, f"{leading:.2f} s", f"{floor:.1f}", faster])
    words = (
        f"\nA stored sample takes {factored['bytes_a_sample']:,.0f} bytes, "
        f"{factored['row_over_sample']:.0f} times less than a row.\n"
    )
    return table(["MLP 784-100-100-10, two cores", "time", "× floor", "faster than"], rows) + words


def growth(subspace: dict[str, Any]) -> str:
    """Fitted exponents."""
    rows = [
        [
            name,
            ", ".join(f"{size:,}" for size in curve["sizes"]),
            ", ".join(f"{1e3 * s:.1f}" for s in curve["seconds"]),
            f"{curve['exponent']:.2f}",
        ]
        for name, curve in subspace["growth"].items()
    ]
    return table(["time grows with", "sizes", "ms", "exponent"], rows)


def large(of: dict[str, Any]) -> str:
    """A model of 124 million parameters."""
    rows = [
        [
            f"{case['protected']}, {case['parameters'] / 1e6:.1f}M, {case['storage']}",
            str(case["tasks"]),
            f"{1e3 * case['plain_s']:.1f}",
            f"{1e3 * case['guarded_s']:.1f}",
            f"{100 * case['share_of_step']:.1f} %",
            f"{case['times_floor']:.2f}",
        ]
        for case in of["cases"]
    ]
    headings = ["protected", "tasks", "step, ms", "with guard, ms", "share of the step"]
    words = (
        f"\n{of['device']}, torch {of['torch']}: GPT-2-small's shape, 8 × 512 tokens, bfloat16 "
        "autocast, AdamW, 64 directions a task. The floor is two passes over the rows.\n"
    )
    if (kron := of.get("eigenbasis")) is not None:
        words += (
            f"\nKronOGD there: a step takes {1e3 * kron['guarded_s']:.1f} ms in place of "
            f"{1e3 * kron['plain_s']:.1f} ({kron['step_over_plain']:.2f} times), `end_task` of "
            f"{kron['sequences']} sequences {kron['end_task_over_pass']:.1f} forward and backward "
            f"passes over them, and what it stores {kron['bytes'] / 1e9:.2f} GB.\n"
        )
    return table([*headings, "× floor"], rows) + words


def tuned(found: dict[str, Any]) -> str:
    """Methods at settings that were chosen on held-out images."""
    rows = []
    for run in found["chosen"]:
        accuracy, forgotten = run["average_accuracy"], run["forgetting"]
        settings = ", ".join(f"{name} {value:g}" for name, value in run["settings"].items())
        alone = run.get("side_by_side", 1) == 1
        rows.append(
            [
                f"{run['scenario']}, {run['row']}",
                settings if run["searched"] else f"{settings} *",
                f"{mean(accuracy):.2f} ± {pstdev(accuracy):.2f}",
                f"{mean(forgotten):.2f}",
                f"{run['bytes'] / 1e6:.1f} MB",
                f"{run['seconds']:.1f}" if alone else "",
            ]
        )
    headings = ["five seeds, test images", "chosen", "A_T", "F_T", "state of a seed", "seconds"]
    tried = len(found["searched"])
    return table(headings, rows) + (
        f"\nChosen among {tried} runs of two other seeds on 100 held-out training images of each "
        "class.\n*: neighbours of this setting were not tried, and may be better. No seconds: "
        "trained beside others.\n"
    )


def incremental(found: dict[str, Any]) -> str:
    """All methods on all benchmarks, each tuned alike."""
    parts = []
    for cell in found["cells"]:
        body = []
        for row, chosen in zip(cell["rows"], cell["chosen"].values(), strict=True):
            settings = ", ".join(f"{n} {v:g}" for n, v in chosen["settings"].items())
            body.append(
                [
                    row["method"],
                    settings + (" *" if chosen["limits"] else ""),
                    f"{row['average_accuracy']:.2f} ± {row['average_accuracy_interval']:.2f}",
                    f"{row['forgetting']:.2f} ± {row['forgetting_interval']:.2f}",
                    "" if row["p"] is None else f"{row['p']:.2g}",
                    "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB",
                    f"{row['seconds']:.1f}",
                ]
            )
        headings = [cell["title"], "chosen", "A_T", "F_T", "p", "state of a seed", "seconds"]
        diverged = f" Diverged: {', '.join(cell['diverged'])}." if cell["diverged"] else ""
        parts.append(f"{table(headings, body)}\n{cell['footnote']}{diverged}\n")
    held_out = found["cells"][0]["protocol"]["validation_per_class"]
    return "\n".join(parts) + (
        f"\nChosen on held-out training images ({held_out} of each class of MNIST), with two other "
        "seeds. *: at the end of what was tried.\n"
    )


def published(found: dict[str, Any]) -> str:
    """The papers' own figures, and their protocols here."""
    titles = {
        "permuted": "Permuted MNIST, 10 tasks",
        "split-cifar": "10-split CIFAR-100",
        "superclasses": "20 superclasses",
        "superclasses-scrambled": "… scrambled",
        "superclasses-released": "… scrambled, pixels and initial weights as released",
    }
    methods = {"gpm": "GPM", "sgp": "SGP", "adam-nscl": "Adam-NSCL", "sgd": "fine-tuning"}
    rows = []
    for name, run in found.items():
        tasks, method = name.split(":")
        spread = f" ± {pstdev(run['accuracy']):.2f}" if len(run["accuracy"]) > 1 else ""
        printed = [run["printed"][of] for of in ("accuracy", "backward_transfer")]
        epochs = run["epochs"]
        fewer = f" of {epochs['published']}" if epochs["most"] < epochs["published"] else ""
        rows.append(
            [
                f"{titles[tasks]}, {methods[method]}",
                "–" if printed[0] is None else f"{printed[0]:.2f}",
                f"{mean(run['accuracy']):.2f}{spread}",
                "–" if printed[1] is None else f"{printed[1]:.1f}",
                f"{mean(run['backward_transfer']):.2f}",
                str(len(run["seeds"])),
                f"{epochs['most']}{fewer}",
                f"{run['seconds']:.0f}",
            ]
        )
    used = [run["versions"] for run in found.values()]
    machines = sorted({f"{v['device']}, torch {v['torch']}" for v in used})
    words = (
        f"\n{'; '.join(machines)}, several runs at a time.\n"
        "Networks, thresholds and schedules are those of the papers' code. Known differences:\n"
        "it trains on 54,000 images of MNIST, here on all. Of the superclasses it measures five\n"
        "orders (here the first), reads planar images as if colours came last (scrambled), has\n"
        "pixels from 0 to 1 and Kaiming's initial weights, here standardised pixels and PyTorch's\n"
        "initial weights unless said. Fine-tuning had fewer epochs than the methods on CIFAR-100.\n"
    )
    headings = ["", "printed ACC", "ACC", "printed BWT", "BWT", "seeds", "epochs at most"]
    return table([*headings, "seconds"], rows) + words


def class_incremental(measured: dict[str, Any]) -> str:
    """Final accuracies on Split MNIST beside the printed ones."""
    rows = []
    for name, run in measured["rows"].items():
        cells = [name]
        for kind in ("class", "task"):
            cells.append(f"{mean(run[kind]):.1f} ± {pstdev(run[kind]):.1f}")
            known = run["printed"]
            cells.append(f"{known[kind][0]:.1f} ± {known[kind][1]:.1f}" if known else "–")
        rows.append([*cells, str(len(run["class"]))])
    headings = ["method, buffer", "class", "printed", "task", "printed", "seeds"]
    text = (
        "Final accuracy in percent, class- and task-incremental, after one pass over five tasks of "
        "two digits in one full head, at the settings of Mammoth, beside what Buzzega et al. "
        "(2020) print, means of ten runs (`benchmarks/class_incremental.py`).\n\n"
    )
    return text + table(headings, rows)


def versus_avalanche(measured: dict[str, Any]) -> str:
    """Seconds of training here and in Avalanche."""
    rows = []
    for name, pair in measured["rows"].items():
        ours, theirs = pair["forgetless"], pair["avalanche"]
        rows.append(
            [
                name,
                *(f"{side['processor']:.1f}" for side in (ours, theirs)),
                *(f"{theirs[kind] / ours[kind]:.1f}" for kind in ("processor", "clock")),
            ]
        )
    headings = ["method", "seconds here", "Avalanche", "times", "times of the clock"]
    text = (
        f"{measured['steps']} steps of ten images and, in replay, ten stored ones of 500; a "
        "perceptron 784-100-100-10, one thread, seconds of the processor, the faster of "
        f"{measured['repeats']} repeats in turns; Avalanche {measured['versions']['avalanche']} "
        "(`benchmarks/versus_avalanche.py`).\n\n"
    )
    return text + table(headings, rows)


SECTIONS = (
    ("Whole runs on one GPU", ["gpu"], runs),
    ("Methods at their own best settings, on one GPU", ["tuned"], tuned),
    ("Published protocols of GPM and its relatives", ["published"], published),
    ("Projection on one GPU", ["gpu"], gpu_projection),
    ("Training step on one GPU", ["gpu"], gpu_step),
    ("A large model on one GPU", ["large"], large),
    ("What a guard costs on two cores", ["guard-cpu"], guard),
    (
        "Consolidation, Gram matrices and factored projections",
        ["subspace", "tangent"],
        consolidation,
    ),
    ("Growth", ["subspace"], growth),
)
# What not everyone measures who measures the rest.
WHERE_MEASURED = (
    ("The table: methods and settings, each tuned alike", ["incremental"], incremental),
    ("What a guard costs on one GPU", ["guard-cuda"], guard),
    ("What a step costs in an eigenbasis", ["methods-cpu"], method_steps),
    ("What a step costs in an eigenbasis on one GPU", ["methods-cuda"], method_steps),
    ("Class-incremental methods as printed", ["class_incremental"], class_incremental),
    ("Class-incremental methods beside Avalanche", ["versus_avalanche"], versus_avalanche),
    ("What the end of a task costs", ["end-task-cpu"], end_task),
    ("What the end of a task costs on a language model", ["language-cpu"], language),
    ("What the end of a task costs on one GPU", ["end-task-cuda"], end_task),
)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), "utf-8")
