"""What a chat model keeps while it learns four things one after another, and how well it learns.

SmolLM2-135M-Instruct learns French, German, a verdict on film reviews and a dictionary's style.
What should stay: its answers to prompts (KL per token of the answers it gave before), what it knows
of geography, the loss of English texts, and what it learned before the latest task. Every method is
tried at several settings. One setting of each is chosen on validation texts and prompts: of those
that learn nine tenths of what plain fine-tuning learns, the one that moves the answers least. That
one is trained with the other seeds, too, and measured on other texts and prompts.

    make keep                                     # fetches all packages; on two cores, --quick
    python benchmarks/keep.py runs/keep/packages --device cuda --out    # on a GPU, three seeds

It resumes: runs that the file of the results has are not made again. The page with the answers side
by side is written to runs/keep.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
import keep_data
from _pretrained import pretrained
from keep_data import PARTS, Prompts, Task

from forgetless import EWC, GPM, Guard, KronEWC, KronOGD, Method, TrainingError
from forgetless.llm import Behaviour, ModelComparison, OwnAnswers, own_answers
from forgetless.llm.compare import Examination
from forgetless.support.files import write_atomically
from forgetless.support.provenance import versions

RESULTS = Path(__file__).parent.parent / "results" / "llm"
SHARE = 0.9  # of what plain fine-tuning learns, which a chosen setting must learn, too
GUARDS: dict[str, Callable[[float | None], Method[Any]]] = {
    "EWC": lambda strength: EWC(strength),
    "GPM": lambda threshold: GPM(threshold=threshold),
    "KronEWC": lambda tolerance: KronEWC() if tolerance is None else KronEWC(tolerance=tolerance),
    "KronOGD": lambda energy: KronOGD(energy=energy),
}


@dataclass(frozen=True)
class Setting:
    """A method, its learning rate, and its own knob.

    Arguments:
        method: "plain", "LoRA" (knob: rank), "OSF" (share of the rank that is fixed), "L2"
            (strength of a penalty on the way from the first weights), "replay" and "distillation"
            (weight of the loss on the model's own answers and on earlier tasks: of the tokens, and
            of KL to the model before), or one of `GUARDS`.
        lr: of AdamW.
        knob: None for the method's default.
        share: of the steps that are made: early stopping.
    """

    method: str
    lr: float
    knob: float | None = None
    share: float = 1.0

    @property
    def name(self) -> str:
        """For tables and the page."""
        knob = "" if self.knob is None else f" {self.knob:g}"
        early = "" if self.share == 1 else f", {self.share:.0%} of the steps"
        return f"{self.method}{knob}, lr {self.lr:g}{early}"


def every(method: str, rates: Sequence[float], knobs: Sequence[float | None] = (None,)):
    """All pairs of learning rates and knobs."""
    return [Setting(method, lr, knob) for knob in knobs for lr in rates]


@dataclass(frozen=True)
class Protocol:
    """How much is trained and measured.

    Arguments:
        steps: of each task.
        batch: sequences of a step.
        length: tokens of a sequence.
        blocks: how many of the last blocks are trained; None for all. Of these the linear layers'
            weights are.
        kept: sequences of a finished task that a method may use to remember it.
        held_out: sequences of each task for validation, and for the test.
        prompts: the most of each part.
        new_tokens: of an answer.
        seeds: the first one is that of the search.
        settings: those that are tried.
    """

    steps: int
    batch: int
    length: int
    blocks: int | None
    kept: int
    held_out: int
    prompts: int
    new_tokens: int
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...] = field(repr=False)


RATES = (5e-5, 1e-4, 2e-4)
FULL = Protocol(
    steps=150, batch=16, length=512, blocks=None, kept=256, held_out=64, prompts=160, new_tokens=64,
    seeds=(0, 1, 2),
    settings=(
        *every("plain", (1e-5, 2e-5, *RATES)),
        *(Setting("plain", 1e-4, share=share) for share in (0.25, 0.5)),
        *every("LoRA", (1e-4, 2e-4, 5e-4), (4, 16, 64)),
        *every("OSF", RATES, (0.5, 0.8, 0.95)),
        *every("L2", RATES[1:], (1, 10, 100)),
        *every("EWC", RATES[1:], (1e2, 1e3, 1e4, 1e5)),
        *every("replay", RATES[1:], (0.3, 1)),
        *every("distillation", RATES[1:], (0.3, 1, 3)),
        *every("GPM", RATES[1:], (0.8, 0.9, 0.97)),
        *every("KronEWC", RATES[1:], (None, 0.05, 0.01)),
        *every("KronOGD", RATES[1:], (None, 0.8, 0.9, 0.97)),
    ),
)  # fmt: skip
QUICK = Protocol(
    steps=8, batch=4, length=32, blocks=2, kept=4, held_out=4, prompts=6, new_tokens=8,
    seeds=(0,),
    settings=(
        *every("plain", (5e-4, 2e-4, 2e-3)),
        *every("LoRA", (2e-3, 5e-4, 5e-3), (16,)),
        *every("EWC", (5e-4,), (1e4, 1e6)),
        *every("distillation", (5e-4,), (1,)),
        *every("KronEWC", (5e-4, 1e-3, 2e-3)),
        *every("KronOGD", (5e-4, 1e-3, 2e-3)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What all runs have in common.

    Arguments:
        base: the model before.
        tokenizer: its tokenizer.
        tasks: in their order.
        prompts: those to protect, and those to ask.
        answers: the base model's, to the prompts to protect.
        examinations: "validation" and "test" → the base model's answers to other prompts.
        kinds: of the test's prompts.
        losses: of the base model: part → each task's.
        accuracy: of its verdicts, in the test.
        protocol: the protocol.
    """

    base: nn.Module
    tokenizer: Any
    tasks: list[Task]
    prompts: Prompts
    answers: OwnAnswers
    examinations: Mapping[str, Examination]
    kinds: list[str]
    losses: Mapping[str, list[float]]
    accuracy: float
    protocol: Protocol


def world(
    base: nn.Module, tokenizer: Any, tasks: list[Task], prompts: Prompts, protocol: Protocol
) -> World:
    """The base model's answers and losses."""
    options = {"max_new_tokens": protocol.new_tokens, "batch_size": 32}
    answers = own_answers(base, tokenizer, prompts.protected, **options)
    examinations = {}
    for part, kinds in prompts.asked.items():
        asked = [prompt for some in kinds.values() for prompt in some]
        more = {"texts": prompts.texts, "questions": prompts.questions} if part == "test" else {}
        examinations[part] = Examination(base, tokenizer, asked, **more, **options)
    kinds = [kind for kind, some in prompts.asked["test"].items() for _ in some]
    losses = {p: [evaluated(base, task, p)[0] for task in tasks] for p in PARTS[1:]}
    accuracy = next(s for t in tasks if (s := evaluated(base, t, "test")[1]) is not None)
    return World(
        base, tokenizer, tasks, prompts, answers, examinations, kinds, losses, accuracy, protocol
    )


def prepared(packages: Path, device: str, protocol: Protocol, file: Path) -> World:
    """What all runs have in common: as the file has it, or made from the packages and written."""
    key = versions(torch.device(device)) | {"protocol": repr(protocol)}
    if file.is_file():
        known, found = torch.load(file, map_location=device, weights_only=False)
        if known == key:
            return found
    base, tokenizer = pretrained(packages)
    base = with_frozen(base.to(device).eval(), protocol.blocks)
    most = {"train": protocol.steps * protocol.batch, "validation": protocol.held_out}
    most["test"] = protocol.held_out
    tasks = keep_data.tasks(packages, tokenizer, protocol.length, most)
    made = world(base, tokenizer, tasks, keep_data.prompts(packages, protocol.prompts), protocol)
    write_atomically(file, lambda new: torch.save((key, made), new))
    return made


def autocast(model: nn.Module) -> torch.autocast:
    """Products in bfloat16."""
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)


@torch.no_grad()
def evaluated(model: nn.Module, task: Task, part: str) -> tuple[float, float | None]:
    """Loss per token that counts, and the share of right verdicts."""
    device = next(model.parameters()).device
    total, count, right = 0.0, 0, 0
    model.eval()
    for ids, labels in zip(*(t.split(8) for t in task.parts[part])):
        with autocast(model):
            logits = model(input_ids=ids.to(device)).logits[:, :-1].float()
        wanted = labels[:, 1:].to(device)
        total += float(cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
        count += int((wanted >= 0).sum())
        if task.verdicts:
            chosen = logits[:, -1, list(task.verdicts)].argmax(-1)
            known = torch.tensor(task.verdicts, device=device)[chosen]
            right += int((known == wanted[:, -1]).sum())
    return total / count, right / len(task.parts[part][0]) if task.verdicts else None


class Frozen(nn.Module):
    """First blocks that are never trained; what they made of an input once is remembered.

    Arguments:
        blocks: the blocks, which copies of the model share.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.known: dict[tuple[Any, ...], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frozen":
        return self

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        """The blocks one after another; always anew where keys and values are cached."""
        if options.get("past_key_values") is not None:
            return self._through(hidden, *args, **options)
        is_low = torch.is_autocast_enabled(hidden.device.type)
        key = (is_low, hidden.shape, hidden.detach().cpu().numpy().tobytes())
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self._through(hidden, *args, **options)
        return self.known[key]

    def _through(self, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, *args, **options)
        return hidden


def with_frozen(model: nn.Module, blocks: int | None) -> nn.Module:
    """The model, with all blocks but the last ones as one that is frozen."""
    if blocks is not None:
        model.requires_grad_(False)
        every = [*model.model.layers]
        model.model.layers = nn.ModuleList([Frozen(every[:-blocks]), *every[-blocks:]])
    return model


class Learner:
    """A model that learns by one setting's rules.

    Arguments:
        setting: the setting.
        world: what all runs have in common; the base model is copied.
    """

    def __init__(self, setting: Setting, world: World) -> None:
        self.setting, self._protocol = setting, world.protocol
        self.model: Any = copy.deepcopy(world.base)
        self.model.config.use_cache = False  # of training; generation asks for it
        self._trained = self._chosen()
        self.guard: Guard | None = None
        self.seconds = {"protect": 0.0, "train": 0.0}
        self.step_seconds: list[float] = []
        self._start = [p.detach().clone() for p in self._trained]
        device = self._trained[0].device
        answers = [{k: t.to(device) for k, t in batch.items()} for batch in world.answers]
        # Batches to rehearse, each with the model that knew them.
        self._memory = [(world.base, batch) for batch in answers]
        if setting.method in GUARDS:
            optimizer = torch.optim.AdamW(self._trained, lr=setting.lr)
            method = GUARDS[setting.method](setting.knob)
            self.guard = Guard(self.model, optimizer, method, progress=False)
            if device.type == "cuda":  # to compare with; a CPU has no time for it
                for _ in range(2):  # the first one warms up
                    self.seconds["one pass"] = timed(device, lambda: self._passed(answers))
            self.seconds["protect"] += timed(device, lambda: self.guard.protect(answers))

    def _passed(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Forward and backward through batches, with what a step does with the gradients."""
        for batch in batches:
            self.model(**batch).loss.backward()
        for parameter in self._trained:
            parameter.grad = None

    def _chosen(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        body = self.model.model.layers
        first = 0 if self._protocol.blocks is None else len(body) - self._protocol.blocks
        self.model.requires_grad_(False)
        method, knob = self.setting.method, self.setting.knob
        if method in ("LoRA", "OSF"):
            import peft

            linear = [
                name
                for name, layer in self.model.named_modules()
                if isinstance(layer, nn.Linear) and name.startswith("model.layers.")
                if int(name.split(".")[2]) >= first
            ]
            config = (
                peft.LoraConfig(r=int(knob), lora_alpha=2 * int(knob), target_modules=linear)
                if method == "LoRA"
                else peft.OSFConfig(effective_rank=float(knob), target_modules=linear)
            )
            self.model = peft.get_peft_model(self.model, config)
            return [p for p in self.model.parameters() if p.requires_grad]
        parameters = [p for layer in body[first:] for p in layer.parameters() if p.dim() > 1]
        return [p.requires_grad_() for p in parameters]

    def learn(self, task: Task, generator: torch.Generator, *, remembers: bool) -> None:
        """Train on a task, and remember it if more will come."""
        device = self._trained[0].device
        optimizer = torch.optim.AdamW(self._trained, lr=self.setting.lr, weight_decay=0.0)
        if self.guard is not None:
            self.guard.attach(optimizer)
        ids, labels = (t.to(device) for t in task.parts["train"])
        size, steps = self._protocol.batch, round(self.setting.share * self._protocol.steps)
        order = torch.cat(
            [
                torch.randperm(len(ids), generator=generator)
                for _ in range(-(-steps * size // len(ids)))
            ]
        )
        self.model.train()
        for rows in order[: steps * size].split(size):
            batch = {"input_ids": ids[rows], "labels": labels[rows]}
            place = int(torch.randint(len(self._memory), (), generator=generator))
            taken = timed(device, partial(self._step, optimizer, batch, place))
            self.step_seconds.append(taken)
            self.seconds["train"] += taken
        rehearses = self.setting.method in ("replay", "distillation")
        if not remembers or (self.guard is None and not rehearses):
            return
        some = order[: self._protocol.kept]
        kept = [
            {"input_ids": ids[rows], "labels": labels[rows]} for rows in some.unique().split(size)
        ]
        if self.guard is not None:
            self.seconds["protect"] += timed(device, lambda: self.guard.end_task(kept))
        else:
            known = copy.deepcopy(self.model).requires_grad_(False)
            self._memory += [(known, batch) for batch in kept]

    def _step(self, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], place: int) -> None:
        optimizer.zero_grad()
        with autocast(self.model):
            loss = self.model(**batch).loss + self._rehearsed(place)
        loss.backward()
        optimizer.step()

    def _rehearsed(self, place: int) -> Tensor | float:
        """What is added to the loss so that less is forgotten."""
        method, knob = self.setting.method, self.setting.knob
        if method == "L2":
            pairs = zip(self._trained, self._start, strict=True)
            return knob * sum((p - old).square().sum() for p, old in pairs)
        if method not in ("replay", "distillation"):
            return 0.0
        known, batch = self._memory[place]
        if method == "replay":
            return knob * self.model(**batch).loss
        counts = batch["labels"][:, 1:] >= 0
        with torch.no_grad():
            before = known(input_ids=batch["input_ids"]).logits[:, :-1][counts].float()
        now = self.model(input_ids=batch["input_ids"]).logits[:, :-1][counts].float()
        p, q = before.log_softmax(-1), now.log_softmax(-1)
        return knob * (p.exp() * (p - q)).sum(-1).mean()


def timed(device: torch.device, function: Callable[[], Any]) -> float:
    """Seconds that a function takes, with what it leaves to a GPU."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run(setting: Setting, seed: int, world: World) -> tuple[dict[str, Any], Behaviour | None]:
    """One model through all tasks: the record, and what the model does in the end."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    device = next(world.base.parameters()).device
    record: dict[str, Any] = {"setting": asdict(setting), "name": setting.name, "seed": seed}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses: dict[str, list[float]] = {part: [] for part in PARTS[1:]}  # when learned
    try:
        learner = Learner(setting, world)
        for task in world.tasks:
            learner.learn(task, generator, remembers=task is not world.tasks[-1])
            for part, rows in losses.items():
                rows.append(round(evaluated(learner.model, task, part)[0], 5))
        if device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
        learner.model.config.use_cache = True
        kl = world.examinations["validation"].divergences(learner.model)
        test = world.examinations["test"].of(learner.model)
    except TrainingError as error:
        return record | {"error": str(error)}, None
    scores = [evaluated(learner.model, task, "test")[1] for task in world.tasks]
    record |= {
        "learned": losses,
        "losses": {
            part: [round(evaluated(learner.model, task, part)[0], 5) for task in world.tasks]
            for part in PARTS[1:]
        },
        "accuracy": {t.name: s for t, s in zip(world.tasks, scores) if s is not None},
        "kl": {
            "validation": round(statistics.mean(kl), 6),
            **{kind: round(kl, 6) for kind, kl in by_kind(test, world.kinds).items()},
        },
        "text_loss": round(test.text_loss, 5),
        "right": [sum(test.right), len(test.right)],
        "bytes": learner.guard.memory_report().bytes if learner.guard is not None else None,
        "seconds": {name: round(value, 3) for name, value in learner.seconds.items()},
        "step_seconds": round(statistics.median(learner.step_seconds), 5),
    }
    if learner.guard is not None:
        learner.guard.remove()
    return record, test


def by_kind(found: Behaviour, kinds: Sequence[str]) -> dict[str, float]:
    """KL per token of the answers to each kind of prompts."""
    totals: dict[str, list[float]] = {}
    for kind, kl, n in zip(kinds, found.kl, found.tokens, strict=True):
        total = totals.setdefault(kind, [0.0, 0.0])
        total[0] += kl * n
        total[1] += n
    return {kind: total / n for kind, (total, n) in totals.items()}


def learned(record: Mapping[str, Any], base: Mapping[str, list[float]], part: str) -> float:
    """How far the losses of the tasks have fallen in the end, the mean over the tasks."""
    pairs = zip(base[part], record["losses"][part], strict=True)
    return statistics.mean(before - now for before, now in pairs)


def forgotten(record: Mapping[str, Any], part: str) -> float:
    """How far the losses of all tasks but the last have risen since each was learned."""
    pairs = zip(record["losses"][part], record["learned"][part], strict=True)
    return statistics.mean(now - then for now, then in [*pairs][:-1])


def chosen(
    records: Sequence[Mapping[str, Any]], base: Mapping[str, list[float]], seed: int
) -> dict[str, str]:
    """Method → the name of its setting, by validation texts and prompts."""
    of_seed = [r for r in records if r["seed"] == seed and "error" not in r]
    far = {r["name"]: learned(r, base, "validation") for r in of_seed}
    plain = [far[r["name"]] for r in of_seed if r["setting"]["method"] == "plain"]
    enough = SHARE * max(plain, default=0.0)
    found: dict[str, Mapping[str, Any]] = {}
    for record in of_seed:
        method = record["setting"]["method"]
        best = found.get(method)

        def rank(one: Mapping[str, Any]) -> tuple[bool, float]:
            reaches = far[one["name"]] >= enough
            return reaches, -one["kl"]["validation"] if reaches else far[one["name"]]

        if best is None or rank(record) > rank(best):
            found[method] = record
    return {method: record["name"] for method, record in found.items()}


def remaining(
    protocol: Protocol, methods: Sequence[str], record: Mapping[str, Any]
) -> Iterator[tuple[Setting, int]]:
    """The runs that are still to be made; the choice is looked at when the search is over."""
    wanted = [setting for setting in protocol.settings if setting.method in methods]
    first, *others = protocol.seeds
    for setting in wanted:
        if (setting.name, first) not in {(r["name"], r["seed"]) for r in record["runs"]}:
            yield setting, first
    best = chosen(record["runs"], record["base"], first)
    for setting in wanted:
        for seed in others if setting.name == best.get(setting.method) else ():
            if (setting.name, seed) not in {(r["name"], r["seed"]) for r in record["runs"]}:
                yield setting, seed


def table(record: Mapping[str, Any]) -> str:
    """The chosen settings, and what they learned and kept, as Markdown."""
    base, runs = record["base"], record["runs"]
    kinds = next(list(r["kl"]) for r in runs if "error" not in r)
    kinds.remove("validation")
    headings = [
        "setting", "seeds", "learned", "KL, chat", *(f"KL, {k}" for k in kinds if k != "chat"),
        "questions right", "English texts", "new tasks forgotten", "verdicts right",
        "seconds", "MB kept",
    ]  # fmt: skip
    n_right = base["right"]
    rows = [
        ["before", "", "0", *("0" for _ in kinds), f"{n_right[0]} of {n_right[1]}",
         f"{base['text_loss']:.3f}", "", f"{base['accuracy']:.0%}", "", ""]
    ]  # fmt: skip
    for name in chosen(runs, base, record["protocol"]["seeds"][0]).values():
        some = [r for r in runs if r["name"] == name and "error" not in r]

        def shown(values: Sequence[float], digits: int) -> str:
            text = f"{statistics.mean(values):.{digits}f}"
            more = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            return text + more

        rows.append(
            [
                name,
                str(len(some)),
                shown([learned(r, base, "test") for r in some], 3),
                *(shown([r["kl"][kind] for r in some], 4) for kind in kinds),
                f"{shown([r['right'][0] for r in some], 0)} of {n_right[1]}",
                shown([r["text_loss"] for r in some], 3),
                shown([forgotten(r, "test") for r in some], 3),
                f"{100 * statistics.mean(r['accuracy']['reviews'] for r in some):.0f}%",
                shown([r["seconds"]["train"] + r["seconds"]["protect"] for r in some], 0),
                "" if some[0]["bytes"] is None else f"{some[0]['bytes'] / 1e6:.0f}",
            ]
        )
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_text(record: Mapping[str, Any]) -> str:
    """A record as JSON with a line for each run."""
    head = {key: value for key, value in record.items() if key != "runs"}
    lines = ",\n".join(json.dumps(one) for one in record["runs"])
    return f'{json.dumps(head)[:-1]},\n"runs": [\n{lines}\n]}}\n'


def write(file: Path, text: str) -> None:
    """A file, whole or not at all."""
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))


def page(around: World, folder: Path) -> ModelComparison:
    """All models whose answers are in the folder, as one comparison."""
    models, families = {}, {}
    for file in sorted(folder.glob("*.json")):
        stored = json.loads(file.read_text("utf-8"))
        models[stored["name"]] = Behaviour(**stored["behaviour"])
        families[stored["name"]] = stored["family"]
    found = around.examinations["test"].compared(models, families)
    before = dict(zip((task.name for task in around.tasks), around.losses["test"]))
    base, *_ = found.models
    return replace(found, models={**found.models, base: replace(found.models[base], tasks=before)})


def main() -> None:
    """Make the runs that are missing, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="folder with the downloaded packages")
    parser.add_argument("--quick", action="store_true", help="few steps of the last two blocks")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--methods", help="comma-separated; all by default")
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="folder of the results")
    options = parser.parse_args()
    started = time.monotonic()
    protocol, kind = (QUICK, "quick") if options.quick else (FULL, "full")
    known = list(dict.fromkeys(setting.method for setting in protocol.settings))
    methods = options.methods.split(",") if options.methods else known
    if unknown := sorted({*methods} - {*known}):
        parser.error(f"no method {', '.join(unknown)}: there are {', '.join(known)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    answers = Path("runs") / "keep" / kind
    answers.mkdir(parents=True, exist_ok=True)

    around = prepared(options.packages, options.device, protocol, answers / "base.pt")
    before = around.examinations["test"].base
    how = {k: v for k, v in asdict(protocol).items() if k != "settings"}
    record: dict[str, Any] = {
        "versions": versions(torch.device(options.device)),
        "protocol": json.loads(json.dumps(how)),
        "base": {
            **around.losses,
            "text_loss": before.text_loss,
            "right": [sum(before.right), len(before.right)],
            "accuracy": around.accuracy,
            "tasks": [task.name for task in around.tasks],
        },
        "runs": [],
    }
    file = None if options.out is None else options.out / f"{kind}.json"
    if file is not None and file.is_file():
        old = json.loads(file.read_text("utf-8"))
        if old["protocol"] != record["protocol"]:
            raise SystemExit(f"{file} is of another protocol: give another folder with --out")
        record["runs"] = old["runs"]
    for setting, seed in remaining(protocol, methods, record):
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            print("there is more to run: call it again", flush=True)
            return
        found, behaviour = run(setting, seed, around)
        found["code"] = record["versions"]["code"]
        record["runs"].append(found)
        print(
            f"{setting.name}, seed {seed}: "
            + (
                found.get("error")
                or f"learned {learned(found, record['base'], 'test'):.3f}, KL {found['kl']}, "
                f"{found['right'][0]} right, {found['seconds']}"
            ),
            flush=True,
        )
        if behaviour is not None and seed == protocol.seeds[0]:
            of_end = dict(zip((task.name for task in around.tasks), found["losses"]["test"]))
            stored = asdict(behaviour) | {"tasks": of_end}
            known = {"name": setting.name, "family": setting.method, "behaviour": stored}
            write(answers / f"{setting.name}.json", json.dumps(known, ensure_ascii=False))
        if file is not None:
            write(file, as_text(record))
    print(table(record))
    comparison = page(around, answers)
    print(f"The page is {comparison.write(answers.parent / f'{kind}.html')}")


if __name__ == "__main__":
    main()
