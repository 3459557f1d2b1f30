"""What the guard's default keeps in loops that none of its constants was chosen on.

A Lightning module, a plain convolutional network with momentum, GPT-2 in transformers' `Trainer`,
and fresh LoRA adapters of a pretrained SmolLM2-135M, whose text is protected before training. Each
with no guard, with defaults, and with EWC whose strength is chosen on held-out samples of
both tasks; scores are on test samples, of other seeds. The last case needs the packages of
`make llm` in a folder.

    python benchmarks/frameworks.py [--cases lightning,plain-cnn,gpt2-trainer] [--out]
    python benchmarks/frameworks.py --cases smollm2-lora --models runs/llm --out
    python benchmarks/frameworks.py --table   # of the results that are recorded
"""

import argparse
import copy
import functools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from loops import Task, batches, digits, prose_and_names, shown
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _texts

from forgetless import AGEM, EWC, Guard, KronEWC, KronOGD, Method
from forgetless.support.provenance import versions

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "frameworks.json"
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
BATCH = 32
DEFAULTS: dict[str, Method | None] = {
    "none": None,
    "KronEWC": KronEWC(),
    "KronOGD": KronOGD(),
    "A-GEM": AGEM(),
    "EWC": EWC(),
}
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """A model that learns two tasks.

    Arguments:
        model: before the first task.
        first, second: train it on a task, or remember what it can do.
        score: accuracy in percent, or the loss.
    """

    model: nn.Module
    first: Callable[[Data], None]
    second: Callable[[Data], None]
    score: Callable[[Tensor, Tensor], float]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((model.eval()(x).argmax(1) == y).float().mean())


@torch.no_grad()
def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In nats."""
    losses = [model.eval()(input_ids=t, labels=t).loss for t in x.split(16)]
    return float(torch.stack(losses).mean())


def lightning_network(method: Method | None, seed: int) -> Run:
    """A convolutional network with group norm in Lightning, with Adam and a cosine schedule."""
    import lightning

    from forgetless.guard.frameworks.lightning import GuardCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    epochs = 10

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(), nn.AvgPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.GELU(), nn.AvgPool2d(2),
                nn.Flatten(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 10),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
            return [optimizer], [schedule]

    model = Classifier()
    callbacks = [] if method is None else [GuardCallback(method)]

    def fit(data: Data) -> None:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True))

    return Run(model, fit, fit, functools.partial(accuracy, model))


def plain_cnn(method: Method | None, seed: int) -> Run:
    """Convolutions without normalisation, SGD with momentum, a new optimizer for each task."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    guard: Guard | None = None

    def fit(data: Data) -> None:
        nonlocal guard
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        if guard is not None:
            guard.attach(optimizer)
        elif method is not None:
            guard = Guard(model, optimizer, method)
        model.train()
        task = Task(data, data, data)
        for x, y in batches(task, 500, 2 * seed + (guard is not None and guard.tasks)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if guard is not None:
            guard.end_task(DataLoader(TensorDataset(*data), batch_size=100))

    return Run(model, fit, fit, functools.partial(accuracy, model))


def gpt2(method: Method | None, seed: int) -> Run:
    """GPT-2 with three layers in the `Trainer`, with its linear schedule and clipping."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    from forgetless.guard.frameworks.transformers import GuardTrainerCallback

    config = GPT2Config(
        vocab_size=_texts.CHARACTERS,
        n_positions=_texts.LENGTH,
        n_embd=64,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    callbacks = [] if method is None else [GuardTrainerCallback(method)]

    def fit(data: Data, lr: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=250,
                learning_rate=lr,
                per_device_train_batch_size=BATCH,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                seed=seed,
            )
            dataset = [{"input_ids": tokens, "labels": tokens} for tokens in data[0]]
            trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=list(callbacks))
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    first, second = (functools.partial(fit, lr=lr) for lr in (5e-3, 1e-3))
    return Run(model, first, second, functools.partial(token_loss, model))


def smollm2(folder: Path, method: Method | None, seed: int) -> Run:
    """Fresh adapters of rank 8 in the last 10 of 30 blocks, 40 steps of AdamW on 2 × 32 tokens."""
    import peft

    adapters = peft.LoraConfig(r=8, target_modules=r".*\.2\d\..*_proj")
    model = peft.get_peft_model(copy.deepcopy(pretrained(folder)[0]), adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    if isinstance(method, AGEM):
        method = AGEM(memory=32, batch_size=2)  # as many as in a batch
    guard = None if method is None else Guard(model, optimizer, method)

    def protect(data: Data) -> None:
        if guard is not None:
            guard.protect([{"input_ids": x, "labels": x} for x in data[0].split(8)])

    def fit(data: Data) -> None:
        model.train()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            x = data[0][torch.randint(len(data[0]), (2,), generator=generator)]
            optimizer.zero_grad()
            model(input_ids=x, labels=x).loss.backward()
            optimizer.step()

    return Run(model, protect, fit, functools.partial(token_loss, model))


@functools.cache
def pretrained(folder: Path) -> tuple[nn.Module, Any]:
    """The model of `make llm` and its tokenizer."""
    import keep_a_language_model

    return keep_a_language_model.pretrained(folder)


@functools.cache
def english_and_french(folder: Path) -> tuple[Task, Task]:
    """The manual of Python in English, of which 32 sequences are protected; French messages."""
    import keep_a_language_model

    tokenizer = pretrained(folder)[1]

    def task(text: str, count: int) -> Task:
        tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        sequences = tokens[: len(tokens) // 32 * 32].view(-1, 32)
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
        parts = sequences[order[: count + 40]].split([count, 16, 24])
        return Task(*((x, x) for x in parts))

    french = "\n".join(keep_a_language_model.french(folder))
    return task("\n".join(topics.values()), 32), task(french, 800)


@dataclass(frozen=True)
class Case:
    """Two tasks and what learns them.

    Arguments:
        tasks: makes the tasks.
        run: makes the run of a method and a seed.
        methods: those that are measured.
        strengths: of EWC, to choose from.
    """

    tasks: Callable[[], tuple[Task, Task]]
    run: Callable[[Method | None, int], Run]
    methods: Sequence[str] = tuple(DEFAULTS)
    strengths: Sequence[float] = (1e2, 1e3, 1e4, 1e5)


def cases(models: Path | None) -> dict[str, Case]:
    """Name → case; the pretrained model's only if the folder is known."""
    found = {
        "lightning": Case(digits(lambda x: x.flip(3)), lightning_network),
        "plain-cnn": Case(digits(lambda x: x.mT), plain_cnn),
        "gpt2-trainer": Case(prose_and_names, gpt2),
    }
    if models is not None:
        found["smollm2-lora"] = Case(
            functools.partial(english_and_french, models),
            functools.partial(smollm2, models),
            ("none", "KronEWC", "A-GEM", "EWC"),
            (1e3, 1e5),
        )
    return found


def measured(case: Case, method: Method | None, seed: int, part: str = "test") -> dict[str, Any]:
    """Both tasks one after the other, and scores on a part of their samples."""
    torch.manual_seed(seed)
    tasks = case.tasks()
    run = case.run(method, seed)
    found: dict[str, Any] = {"seed": seed}
    for number, (task, learn) in enumerate(zip(tasks, (run.first, run.second), strict=True), 1):
        started = time.process_time()
        learn(task.train)
        found[f"task_{number}_cpu_s"] = time.process_time() - started
        if number == 1:
            found["before"] = run.score(*getattr(tasks[0], part))
    found["scores"] = [run.score(*getattr(task, part)) for task in tasks]
    return found


def tuned(case: Case) -> float:
    """The strength of EWC with the best mean of both scores on held-out samples."""
    scores = []
    for strength in case.strengths:
        run = measured(case, EWC(strength), SEARCH_SEED, "held_out")
        is_loss = run["before"] < 20
        scores.append(sum(run["scores"]) * (-1 if is_loss else 1))
    return case.strengths[scores.index(max(scores))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="comma-separated; by default all that can be run")
    parser.add_argument("--methods", help="comma-separated, such as KronEWC,tuned")
    parser.add_argument("--models", type=Path, help="folder with the packages of `make llm`")
    parser.add_argument("--seeds", help="comma-separated, added to those that are recorded")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    parser.add_argument("--table", action="store_true", help="print the recorded results")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(RESULTS.read_text())["rows"]))
        return
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    known = cases(arguments.models)
    rows: list[dict[str, Any]] = []
    if arguments.out and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    for name in arguments.cases.split(",") if arguments.cases else known:
        case = known[name]
        chosen = arguments.methods.split(",") if arguments.methods else (*case.methods, "tuned")
        for kind in chosen:
            label = "EWC, tuned" if kind == "tuned" else kind
            known_row = next((r for r in rows if (r["case"], r["method"]) == (name, label)), None)
            if arguments.seeds and known_row:
                runs, strength = known_row["runs"], known_row["strength"]
            else:
                runs, strength = [], tuned(case) if kind == "tuned" else None
            method = DEFAULTS[kind] if strength is None else EWC(strength)
            seeds = [*map(int, arguments.seeds.split(","))] if arguments.seeds else SEEDS
            runs = [*runs, *(measured(case, method, seed) for seed in seeds)]
            rows = [row for row in rows if row is not known_row]
            rows.append(
                {
                    "case": name,
                    "method": label,
                    "setting": repr(method),
                    "strength": strength,
                    "runs": runs,
                    "versions": versions(torch.device("cpu")),
                }
            )
            old, new = ([r["scores"][i] for r in runs] for i in (0, 1))
            print(f"{name:14}{label:12}{shown(old)}  {shown(new)}  {method}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Old and new task for each method and case, as Markdown."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    found = {(row["case"], row["method"]): row["runs"] for row in rows}
    before = [found[name, "none"] for name in names]
    cells = [f"{sum(r['before'] for r in runs) / len(runs):.2f} / –" for runs in before]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines.append("| before the second task | " + " | ".join(cells) + " |")
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for name in names:
            runs = found.get((name, method))
            means = [sum(r["scores"][i] for r in runs) / len(runs) for i in (0, 1)] if runs else []
            cells.append(" / ".join(f"{m:.2f}" if m < 20 else f"{m:.1f}" for m in means) or "–")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
