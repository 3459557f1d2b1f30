"""What guarding a Llama of 8B parameters takes, layer kind by layer kind, on this machine.

    python benchmarks/layers.py [--device cuda] [--model 8B] [--smaller 1] [--train] [--out]

The model is on the device "meta", where it has shapes and no weights. Its moments' shapes are those
that KronOGD would store. For every kind of layer the time of adding up its moments over some
tokens, of their eigenvectors and of a guarded step is measured once on tensors of the real shapes,
and counted as often as the model has such a layer; layers with the same inputs have one moment of
them. Forward and backward passes of the model are not in it. `--smaller 16` divides all widths, to
try the script on a CPU. `--train` gives the model random weights in place of all that, and guards
it for some real steps: for `--model 1B` or `3B`, on one GPU.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forgetless
from forgetless.linalg import Layout
from forgetless.subspace.eigenbasis import Axis, Eigenbasis, Frame
from forgetless.support.provenance import versions
from forgetless.tangent import Batch, moment_shapes
from forgetless.tangent.inputs import MomentSum

OUT = Path("results/bench")
# Shapes of published models: width, inner width, layers, heads, heads of keys and values.
MODELS = {
    "1B": (2048, 8192, 16, 32, 8),
    "3B": (3072, 8192, 28, 24, 8),
    "8B": (4096, 14336, 32, 32, 8),
}
WORDS = 128256
PROTECTED = 0.5  # share of the leading eigenvectors of each side with protected coordinates


def llama(name: str, smaller: int, device: str) -> torch.nn.Module:
    """The model; on "meta" it has no weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, layers, heads, of_keys = MODELS[name]
    config = LlamaConfig(
        vocab_size=WORDS // smaller,
        hidden_size=width // smaller,
        intermediate_size=inner // smaller,
        num_hidden_layers=layers,
        num_attention_heads=max(1, heads // smaller),
        num_key_value_heads=max(1, of_keys // smaller),
        head_dim=width // heads,
        tie_word_embeddings=name != "8B",
        use_cache=False,
        attn_implementation="eager",  # others ask for values of the mask
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def kinds(model: torch.nn.Module) -> Counter:
    """(outputs, inputs, whether G is a matrix, whether A is its own) → how many layers have it."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    values |= dict(model.named_buffers())
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    names = [name for name, _ in model.named_parameters()]
    found = moment_shapes(
        model,
        values,
        Batch((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ()),
        lambda outputs: outputs.logits.flatten(1).sum(1),
        names=names,
    )
    return Counter(
        (len(g), values[name][0].numel(), g.dim() == 2, found.source[name] == name)
        for name, g in found.outputs.items()
    )


def seconds(act: Callable[[], object], device: str, rounds: int) -> float:
    """The median time of a call."""
    found = []
    for number in range(rounds + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        if device == "cuda":
            torch.cuda.synchronize()
        if number or rounds == 1:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def rows_of(width: int, count: int, device: str) -> Tensor:
    """Inputs whose moment's eigenvalues fall as those of real ones do."""
    rows = torch.randn(count, width, device=device)
    return rows * torch.logspace(0, -2, width, device=device)


def side(width: int, tokens: int, device: str, rounds: int) -> dict[str, float]:
    """A square moment: the time to add it up, and that of its eigenvectors."""
    rows = rows_of(width, tokens, device)

    def moment() -> Tensor:
        total = MomentSum()
        total.add(rows)
        return total.take()

    found = {"moment_s": seconds(moment, device, rounds)}
    several = moment().unsqueeze(0)
    found["eigenvectors_s"] = seconds(lambda: Axis.of(several, rows), device, 1)
    return found


def step(r: int, c: int, two_sided: bool, device: str, rounds: int) -> float:
    """The time of the projection of one layer's step."""
    u = torch.randn(1, r, r if two_sided else 0, device=device)
    v = torch.randn(1, c, c, device=device)
    outputs = Axis(u, torch.ones(1, r, device=device), torch.zeros(1, device=device))
    inputs = Axis(v, torch.ones(1, c, device=device), torch.zeros(1, device=device))
    basis = Eigenbasis({"w": outputs}, {"w": inputs}, {"w": "w"}, {}, {})
    rows = max(1, int(PROTECTED * r)) if two_sided else r
    mask = torch.ones(1, rows, max(1, int(PROTECTED * c)), dtype=torch.bool, device=device)
    frame = Frame.of(basis, "w", mask, Layout({"w": (r, c)}))
    parts = {"w": torch.randn(1, r, c, device=device)}

    def project() -> None:
        frame.take_out(frame.coordinates(parts), dict(parts))

    return seconds(project, device, rounds)


def table(name: str, smaller: int, tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """Every kind of layer, and their sum."""
    model = llama(name, smaller, "meta")
    counts = kinds(model)
    widths = {r for r, _, square, _ in counts if square} | {c for _, c, _, _ in counts}
    sides = {}
    for width in sorted(widths):
        sides[width] = side(width, tokens, device, rounds)
        print(f"side of {width:>6,}: {sides[width]}", flush=True)
    steps: dict[tuple[int, int, bool], float] = {}
    rows = []
    for (r, c, square, own), count in sorted(counts.items()):
        if (r, c, square) not in steps:
            steps[r, c, square] = step(r, c, square, device, rounds)
        of = ([sides[r]] if square else []) + ([sides[c]] if own else [])
        numbers = (r * r + r if square else r) + (c * c + c if own else 0)
        rows.append(
            {
                "outputs": r,
                "inputs": c,
                "two_sided": square,
                "own_inputs": own,
                "layers": count,
                "stored_bytes": 4 * numbers,
                "moment_s": sum(one["moment_s"] for one in of),
                "eigenvectors_s": sum(one["eigenvectors_s"] for one in of),
                "step_s": steps[r, c, square],
            }
        )
        print(rows[-1], flush=True)
    sums = ("stored_bytes", "moment_s", "eigenvectors_s", "step_s")
    total = {key: sum(row["layers"] * row[key] for row in rows) for key in sums}
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "tokens": tokens, "kinds": rows, "total": total}


def trained(name: str, smaller: int, device: str, rounds: int) -> dict[str, Any]:
    """A model with random weights: its steps with and without a guard, and storing a task."""
    torch.manual_seed(0)
    model = llama(name, smaller, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(model.config.vocab_size, (4, 128), device=device)
    batch = {"input_ids": ids, "labels": ids}

    def one_pass() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            model(**batch).loss.backward()

    def plain() -> None:
        one_pass()
        optimizer.step()

    found = {"parameters": sum(p.numel() for p in model.parameters())}
    found["plain_s"] = seconds(plain, device, rounds)
    found["pass_s"] = seconds(one_pass, device, rounds)
    guard = forgetless.Guard(model, optimizer, forgetless.KronOGD(energy=0.95), drift_samples=0)
    found["end_task_s"] = seconds(lambda: guard.protect(batch), device, 1)
    found["guarded_s"] = seconds(plain, device, rounds)
    found["stored_bytes"] = guard.memory_report().bytes
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="8B", choices=tuple(MODELS))
    parser.add_argument("--smaller", type=int, default=1, help="all widths divided by it")
    parser.add_argument("--tokens", type=int, default=32768, help="whose moments are added up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="guard a model with random weights")
    parser.add_argument("--out", action="store_true", help="write results/bench/layers-….json")
    options = parser.parse_args()
    name, smaller, device, rounds = (
        options.model, options.smaller, options.device, options.rounds
    )  # fmt: skip
    setting = {
        "model": name,
        "smaller": smaller,
        "device": device,
        "versions": versions(torch.device(device)),
    }
    if options.train:
        found = trained(name, smaller, device, rounds)
    else:
        found = table(name, smaller, options.tokens, device, rounds)
    print(json.dumps(found if options.train else found["total"], indent=1))
    if options.out:
        kind = "steps" if options.train else "layers"
        size = f"{name}-{smaller}th" if smaller > 1 else name
        path = OUT / f"{kind}-{size}-{device}.json"
        path.write_text(json.dumps({**setting, **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
