"""The page: all results and verdicts as Markdown, made from the stored records alone."""

from collections import Counter
from pathlib import Path
from typing import get_args

from forgetless.paper.answers import answers
from forgetless.paper.artefacts import ARTEFACTS
from forgetless.paper.benchmarks import NAMES, SCALES
from forgetless.paper.claims import ALL
from forgetless.paper.claims.base import FAILS, Verdict, judged
from forgetless.paper.numbers import listed, table
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import Results, load_results, readable
from forgetless.support.files import write_atomically
from forgetless.support.validation import TraceError

_PAPER = "[A Theoretical Analysis of Catastrophic Forgetting through the NTK Overlap Matrix]"
_LINK = "(https://arxiv.org/abs/2010.04003)"
_MADE_WITH = ("device", "torch", "code")
# What the paper says or raises, and this page does not answer.
_OPEN = (
    "**Convolutions trained, batch norm frozen on Split CIFAR.** *Corrected* trains convolutions "
    "and never freezes batch norm, so claims that fail only there do not tell which of the two is "
    "the reason. Not run: it takes a GPU. `forgetless compare split-cifar100 --seeds 5 "
    "--eval-mode-after 1000` trains the missing cells.",
    "**Where the theory predicts real training.** No run holds the kernel fixed, and all networks "
    "have the paper's width. How the theorem's Δ fares with linearised training, or in wider "
    "layers, is open; so is whether a constant kernel explains any result.",
    "**Stale or fresh directions.** OGD and PCA-OGD keep directions of a kernel that changes; "
    "A-GEM takes gradients at the present weights. Stored directions were not recomputed from kept "
    "samples, so how much of the difference is the kernel's change is not measured; the table of "
    "the kernel's change says how much of a task's features has left them.",
    "**The pattern across tasks of Split CIFAR (section 5.3).** The paper names superclasses as a "
    "possible reason. Splits by superclass, by label and at random were not compared.",
    "**The memory figures, task by task (section 5.2).** They print no numbers. The final accuracy "
    "on every task at every memory is in results/paper/memory.json.",
    "**Exact PCA and the second pass of Gram-Schmidt**, the two departures from the released code. "
    "Their effect was not measured apart; all 20 cells of A_T agree with them.",
)
_PLURAL = {word: word.replace("holds", "hold").replace("does", "do") for word in get_args(Verdict)}


def write_page(results: Path, page: Path, images: Path) -> None:
    """Build the page and its figures from the results.

    Arguments:
        results: folder of the records.
        page: the file to write.
        images: folder for the figures, at or below the page's.
    """
    records = load_results(results, list(ARTEFACTS))
    if not records:
        raise TraceError(f"there are no results in {results}: `forgetless paper build` makes them")
    text, pictures = make_page(records, images.relative_to(page.parent).as_posix())
    write_atomically(page, lambda file: file.write_text(text, "utf-8"))
    pictures.save(images)


def make_page(records: Results, images: str) -> tuple[str, Pictures]:
    """The page's text and its figures; `images` is their folder relative to the page."""
    pictures = Pictures(images)
    lines = [
        *_head(records),
        *_verdicts(records),
        *([] if _is_small(records) else ["## Not answered", "", *(f"- {o}" for o in _OPEN), ""]),
        "## Evidence",
        "",
    ]
    for name, artefact in ARTEFACTS.items():
        place = f"In the paper: {artefact.place}" if artefact.place else "Not in the paper"
        lines += [f"### {artefact.title}", "", f"*{place}.*", ""]
        if name in records:
            with readable(name):
                lines += artefact.show(records[name]["data"], pictures)
            lacks = records[name].get("lacks")
            if lacks:
                lines += [f"Not measured yet: {listed(lacks)} ({_command(records, name)}).", ""]
        else:
            lines += [f"Not measured yet: {_command(records, name)}.", ""]
    return "\n".join([*lines, *_provenance(records)]), pictures


def _is_small(records: Results) -> bool:
    return any(record["scale"] == "small" for record in records.values())


def _command(records: Results, name: str) -> str:
    """The command that builds an artefact."""
    return f"`forgetless paper build {name}{' --scale small' if _is_small(records) else ''}`"


def _head(records: Results) -> list[str]:
    """The introduction and the answers."""
    small = _is_small(records)
    title = "# The paper, reproduced and judged" + (" (small)" if small else "")
    scale = SCALES["small" if small else "full"]
    named = ((NAMES[key], task_set.title) for key, task_set in scale.benchmarks.items())
    titles = ", ".join(f"*{name}* is {title}" for name, title in named if name != title)
    seeds = sorted({str(record["seeds"]) for record in records.values()})
    lines = [
        title,
        "",
        f"{_PAPER}{_LINK} (Doan, Bennani, Mazoure, Rabusseau and Alquier, 2021), claim by claim. "
        + _origin(small),
        "",
        f"Here {titles}. Mean ± standard deviation over {', '.join(seeds) or 'no'} seeds unless "
        "said; accuracies and differences in percent and points. A difference is ± half its 95 % "
        "interval by Student's t (with five seeds 2.8 standard errors), paired over seeds; where "
        "two benchmarks, or the paper and this code, are compared, by Welch's. *Clearly* is with "
        "the whole of that interval, and a verdict that it does not decide is not decided. Rules "
        "that were changed after their numbers were known are marked with what the rule before "
        "said; where it was the same with two standard errors (88 % with five seeds) or with means "
        "alone, only if it said something else.",
        "",
        "*A_T* is the mean final accuracy over all tasks, *F_T* the mean over all tasks but the "
        "last of max_{t ≥ s} a_{t,s} − a_{T,s}, with a_{t,s} the accuracy on task s after task t. "
        "*Δ* is how far a task's outputs move while later ones are learned, squared and summed, "
        "and *O(s→k)* the overlap matrix of tasks s and k, whose singular values the paper calls "
        "eigenvalues. "
        "*Released* is the paper's code as it ran, but for two departures "
        f"({'docs/methods.md' if small else '[methods](methods.md)'}): "
        "PCA is exact and Gram-Schmidt done twice; *corrected* has the methods as they should be "
        "on a network that trains as a whole, *frozen* the same methods on the network as the "
        "released code trains it.",
        "",
    ]
    if small:
        lines += [
            "**Scale: small.** Everything ran on 8x8 digits with tiny networks, to see that it "
            "runs. The printed numbers next to these are of MNIST and CIFAR-100: no verdict here "
            "says anything about the paper.",
            "",
        ]
    return [*lines, "## Asked and answered", "", *answers(records)]


def _origin(small: bool) -> str:
    """The results and the commands from which the page is made."""
    folder, scale = ("results", " --scale small") if small else ("../results/paper", "")
    return (
        f"This page is generated from [{folder.removeprefix('../')}]({folder}) by "
        f"`forgetless paper page{scale}`; `forgetless paper build all{scale}` trains and measures "
        "all of it again."
    )


def _verdicts(records: Results) -> list[str]:
    """One row per claim, and the number of each verdict."""
    counts: Counter[str] = Counter()
    slips, changed = 0, 0
    lines, number = [], 0
    for group, claims in ALL.items():
        rows = []
        for claim in claims:
            number += 1
            word, measured, why = judged(claim, records)
            slip = claim.slip and word == FAILS
            slips += slip
            changed += "changed after the numbers" in why
            counts[word] += not slip
            says = f"{claim.says} *({claim.place})*"
            rows.append(
                [
                    str(number),
                    says,
                    measured,
                    claim.test,
                    f"**{word}**",
                    f"a slip; {why}" if slip else why,
                ]
            )
        headings = ["", "the paper says", "measured", "the test", "verdict", "why"]
        text = table(headings, rows)
        text[1] = "|---|---|---|---|---|---|"
        lines += [f"### {group}", "", *text]
    tally = ", ".join(
        f"{counts[word]} {_PLURAL[word] if counts[word] > 1 else word}"
        for word in get_args(Verdict)
        if counts[word]
    )
    tally += f"; {slips} are slips of notation or wording, without effect on any result"
    told = f"{changed} rows also have the verdict of a rule before the present one, which was "
    told += "changed after the numbers were known."
    return ["## Verdicts", "", f"{number} claims: {tally}. {told}", "", *lines]


def _provenance(records: Results) -> list[str]:
    """Where the numbers come from."""
    rows = []
    for name, record in records.items():
        source = record["provenance"]
        with readable(name):
            # Without training, the device and versions are those of the measurement.
            made = list(source["runs"].values()) or [source]
            where = ["; ".join(sorted({run[part] for run in made})) for part in _MADE_WITH]
            seconds = [f"{source[f'seconds {what}']:.0f}" for what in ("training", "measuring")]
            rows.append([f"`{name}`", str(len(source["runs"])), *seconds, *where])
    headings = ["artefact", "runs", "seconds training", "seconds measuring"]
    return [
        "## Where the numbers come from",
        "",
        "Runs are shared between artefacts and trained once; each artefact counts all that it "
        "uses. Settings of every run and hashes of the data files are in the JSON files.",
        "",
        *table([*headings, *_MADE_WITH], rows),
    ]
