"""What methods keep in a practitioner's loop: two tasks, AdamW, a guard made at the start.

Each method with its defaults, and with its own knob chosen on held-out samples of both tasks (the
best mean of the two scores); all scores are on test samples, of other seeds. Small
enough for two cores.

    python benchmarks/loops.py [--cases cnn-turned,llama-names] [--out]
    python benchmarks/loops.py --table   # of the results that are recorded
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _texts

from forgetless import AGEM, EWC, GPM, OGD, PCAOGD, Guard, KFACLaplace, KronEWC, KronOGD, Method
from forgetless.support.provenance import versions

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "loops.json"
SEARCH_SEEDS, SEEDS = (100,), (0, 1, 2)
# Name → the method with its defaults, and with other values of its knob.
METHODS: dict[str, Sequence[Method | None]] = {
    "none": (None,),
    "EWC": (EWC(), *(EWC(10.0**k) for k in (3, 4, 5))),
    "K-FAC Laplace": (KFACLaplace(), KFACLaplace(30.0), KFACLaplace(1000.0)),
    "A-GEM": (AGEM(), AGEM(500)),
    "OGD": (OGD(), OGD(500)),
    "PCA-OGD": (PCAOGD(), PCAOGD(500)),
    "GPM": (GPM(), GPM(threshold=0.9), GPM(threshold=0.99)),
    "KronEWC": (KronEWC(), KronEWC(tolerance=0.1)),
    "KronOGD": (KronOGD(), *(KronOGD(energy=e) for e in (0.9, 0.98, 0.995))),
}


@dataclass(frozen=True)
class Task:
    """Inputs and labels of training, held-out and test samples."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Task":
        """A seventh each is held out and tested on, always the same."""
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        seventh = len(x) // 7
        held_out, test, train = order.split([seventh, seventh, len(x) - 2 * seventh])
        return cls(*((x[part], y[part]) for part in (train, held_out, test)))


@dataclass(frozen=True)
class Case:
    """Two tasks, a model and its loop.

    Arguments:
        tasks: makes the two tasks.
        model: makes the model.
        steps: of each task.
        lr: of each task.
        is_language: whether scores are losses of the next token (else accuracies in percent).
    """

    tasks: Callable[[], tuple[Task, Task]]
    model: Callable[[], nn.Module]
    steps: int
    lr: tuple[float, float]
    is_language: bool = False

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """As the loop minimises it."""
        return model(input_ids=x, labels=y).loss if self.is_language else cross_entropy(model(x), y)

    @torch.no_grad()
    def score(self, model: nn.Module, x: Tensor, y: Tensor) -> float:
        """Accuracy in percent, or the loss."""
        model.eval()
        if self.is_language:
            return float(self.loss(model, x, y))
        return 100 * float((model(x).argmax(1) == y).float().mean())


def digits(change: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Task, Task]]:
    """Digits, then the same changed."""

    def made() -> tuple[Task, Task]:
        data = load_digits()
        x = torch.from_numpy(data.images).float().unsqueeze(1) / 16
        y = torch.from_numpy(data.target)
        return Task.of(x, y), Task.of(change(x), y)

    return made


def new_classes() -> tuple[Task, Task]:
    """Digits 0 to 4, then 5 to 9, in one head."""
    (task, _) = digits(lambda x: x)()
    parts = [(x, y) for x, y in (task.train, task.held_out, task.test)]
    first = Task(*((x[y < 5], y[y < 5]) for x, y in parts))
    return first, Task(*((x[y >= 5], y[y >= 5]) for x, y in parts))


def prose_and_names() -> tuple[Task, Task]:
    """The manual of Python, then the names of characters."""
    prose, names = _texts.prose(), _texts.character_names()
    return Task.of(prose[:7000], prose[:7000]), Task.of(names[:7000], names[:7000])


def chains() -> tuple[Task, Task]:
    """Two Markov chains over the same 32 tokens; the first token of a sequence says which."""

    def sequences(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        next_ones = torch.stack([torch.randperm(32, generator=generator) for _ in range(2)], 1)
        state = torch.randint(32, (2100,), generator=generator)
        found = [torch.full((2100,), 32 + number)]
        for _ in range(31):
            found.append(state)
            state = next_ones[state, (torch.rand(2100, generator=generator) < 0.15).long()]
        return torch.stack(found, 1)

    first, second = sequences(0), sequences(1)
    return Task.of(first, first), Task.of(second, second)


def cnn() -> nn.Module:
    """Two convolutions with batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def perceptron() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def llama() -> nn.Module:
    """Two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_texts.CHARACTERS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=_texts.LENGTH,
        )
    )


CASES = {
    "cnn-turned": Case(digits(lambda x: x.rot90(1, (2, 3))), cnn, 600, (1e-3, 1e-3)),
    "cnn-inverted": Case(digits(lambda x: 1 - x), cnn, 600, (1e-3, 1e-3)),
    "cnn-new-classes": Case(new_classes, cnn, 300, (1e-3, 1e-3)),
    "perceptron-turned": Case(digits(lambda x: x.rot90(1, (2, 3))), perceptron, 600, (1e-3, 1e-3)),
    "llama-chains": Case(chains, llama, 200, (3e-3, 1e-3), is_language=True),
    "llama-names": Case(prose_and_names, llama, 200, (5e-3, 1e-3), is_language=True),
}


def batches(task: Task, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches of 32, the same for every method."""
    generator = torch.Generator().manual_seed(seed)
    x, y = task.train
    for _ in range(steps):
        index = torch.randint(len(x), (32,), generator=generator)
        yield x[index], y[index]


def run(case: Case, method: Method | None, seed: int) -> dict[str, Any]:
    """Both tasks one after the other."""
    torch.manual_seed(seed)
    first, second = case.tasks()
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr[0])
    guard = None
    if method is not None:
        guard = Guard(model, optimizer, method, drift_samples=16 if method.adapts else 0)
    found: dict[str, Any] = {"seed": seed}
    for number, task in enumerate((first, second)):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = case.lr[number]
        started = time.perf_counter()
        for x, y in batches(task, case.steps, 2 * seed + number):
            optimizer.zero_grad()
            case.loss(model, x, y).backward()
            optimizer.step()
        found[f"step_{number + 1}_s"] = (time.perf_counter() - started) / case.steps
        if number == 0:
            found["before"] = case.score(model, *first.test)
            if guard is not None:
                started = time.perf_counter()
                x, y = first.train
                pairs = zip(x.split(100), y.split(100), strict=True)
                guard.end_task(
                    [{"input_ids": a, "labels": b} for a, b in pairs] if case.is_language
                    else list(pairs)
                )  # fmt: skip
                found["end_task_s"] = time.perf_counter() - started
                found["bytes"] = guard.memory_report().bytes
    for part in ("held_out", "test"):
        found[part] = [case.score(model, *getattr(task, part)) for task in (first, second)]
    return found


def main() -> None:
    """Search, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    parser.add_argument("--table", action="store_true", help="print the recorded results")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of too much or too little that is removed
    record: dict[str, Any] = {"versions": versions(torch.device("cpu")), "rows": []}
    chosen = [(c, m) for c in arguments.cases.split(",") for m in arguments.methods.split(",")]
    if arguments.out and arguments.out.exists():  # what is not measured again stays
        known = json.loads(arguments.out.read_text())
        record["rows"] = [
            {"versions": known["versions"], **row}
            for row in known["rows"]
            if (row["case"], row["method"]) not in chosen
        ]
    for name in arguments.cases.split(","):
        case = CASES[name]
        for kind in arguments.methods.split(","):
            settings = METHODS[kind]
            best = settings[0]
            if len(settings) > 1:
                scores = []
                for method in settings:
                    runs = [run(case, method, seed)["held_out"] for seed in SEARCH_SEEDS]
                    scores.append(sum(map(sum, runs)) * (-1 if case.is_language else 1))
                best = settings[scores.index(max(scores))]
            for how, method in {"defaults": settings[0], "tuned": best}.items():
                if how == "tuned" and len(settings) == 1:
                    continue
                known = [
                    r for r in record["rows"] if (r["case"], r["setting"]) == (name, repr(method))
                ]
                runs = known[0]["runs"] if known else [run(case, method, seed) for seed in SEEDS]
                row = {"case": name, "method": kind, "how": how, "setting": repr(method)}
                record["rows"].append({**row, "runs": runs})
                old, new = ([r["test"][i] for r in runs] for i in (0, 1))
                print(f"{name:18}{kind:14}{how:9}{shown(old)}  {shown(new)}  {method}", flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


def shown(values: Sequence[float]) -> str:
    """The mean and the range."""
    digits = 2 if max(values) < 10 else 1
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(record: dict[str, Any]) -> str:
    """Old task and new task for each method and case, as Markdown."""
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    lines = ["| method | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    found = {(row["method"], row["how"], row["case"]): row["runs"] for row in record["rows"]}
    for method, how in dict.fromkeys((row["method"], row["how"]) for row in record["rows"]):
        cells = []
        for case in cases:
            if (method, how, case) not in found:
                cells.append("–")
                continue
            runs = found[method, how, case]
            old, new = (sum(r["test"][i] for r in runs) / len(runs) for i in (0, 1))
            digits = 2 if CASES[case].is_language else 1
            cells.append(f"{old:.{digits}f} / {new:.{digits}f}")
        lines.append(f"| {method}, {how} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
