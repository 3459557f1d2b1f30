"""What the end of a task costs on a language model: directions in memory, against a pass.

    python benchmarks/language.py [--repeats 3] [--threads 1] [--only 22M] [--out]

Llamas with random weights and a tied vocabulary; the task is one batch of 8 sequences of 32 tokens.
`end_task` of PCA-OGD and OGD is measured in turns with a forward and a backward pass of the same
batch, and with a loop over the samples that any user could write: eight gradients as rows, their
Gram matrix, and its eigenvectors' combinations of the rows. Seconds are those of the processor, on
one thread, so that other work on the machine counts little. Peaks of memory are those of the
process above what it held before, as Linux counts them.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import forgetless
from forgetless.support.provenance import versions

OUT = Path("results/bench/language-cpu.json")
SEQUENCES, TOKENS = 8, 32
# Width, width of the perceptrons, layers, heads, heads of keys, vocabulary: the second is the shape
# of SmolLM2-135M.
SHAPES = {"22M": (384, 1024, 10, 6, 2, 16384), "135M": (576, 1536, 30, 9, 3, 49152)}
METHODS = {
    "PCA-OGD": forgetless.PCAOGD(components=SEQUENCES, samples=SEQUENCES),
    "OGD": forgetless.OGD(samples=SEQUENCES),
}


def llama(shape: str) -> nn.Module:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, layers, heads, keys, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=keys,
            tie_word_embeddings=True,
        )
    )


def one_pass(model: nn.Module, tokens: Tensor) -> None:
    """A forward and a backward pass."""
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()


def by_loop(model: nn.Module, tokens: Tensor) -> Tensor:
    """The principal directions of the samples' gradients, one sample after the other."""
    parameters = [*model.parameters()]
    rows = torch.empty(len(tokens), sum(p.numel() for p in parameters))
    for row, sample in zip(rows, tokens, strict=True):
        one_pass(model, sample.unsqueeze(0))
        torch.cat([p.grad.flatten() for p in parameters], out=row)
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    return (vectors / values.sqrt()).T.float() @ rows


def measured(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the processor, and the bytes of memory at the peak above those before."""
    gc.collect()  # a guard and its optimizer know each other
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.process_time()
    call()
    return time.process_time() - start, _status("VmHWM") - before


def _status(kind: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def end_task(shape: str, method: str, repeats: int) -> dict:
    """One row of results."""
    model = llama(shape)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, TOKENS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = 0

    def ours() -> None:
        nonlocal kept
        with forgetless.Guard(model, optimizer, METHODS[method], progress=False) as guard:
            guard.end_task({"input_ids": tokens, "labels": tokens})
            kept = guard.memory_report().bytes

    calls = {
        "end_task": ours,
        "pass": lambda: one_pass(model, tokens),
        "loop": lambda: by_loop(model, tokens),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    peaks = dict.fromkeys(calls, 0)
    for number in range(repeats + 1):
        for name, call in calls.items():
            model.zero_grad()
            seconds, peak = measured(call)
            peaks[name] = max(peaks[name], peak)
            if number:  # the first call also imports, and takes new memory from the machine
                found[name].append(seconds)
    return {
        "model": f"Llama, {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M",
        "method": method,
        "kept_bytes": kept,
        **{f"{name}_s": statistics.median(taken) for name, taken in found.items()},
        **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
        **{
            f"{name}_times_pass": [s / p for s, p in zip(found[name], found["pass"], strict=True)]
            for name in ("end_task", "loop")
        },
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=SHAPES, help="one of the models")
    parser.add_argument("--out", action="store_true", help="write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = []
    for shape in SHAPES if options.only is None else [options.only]:
        for method in METHODS:
            row = end_task(shape, method, options.repeats)
            print(
                f"{row['model']}, {method}: {row['end_task_s']:.1f} s, "
                f"{statistics.median(row['end_task_times_pass']):.2f} passes (loop "
                f"{statistics.median(row['loop_times_pass']):.2f}), peak "
                f"{row['end_task_peak_bytes'] / row['kept_bytes']:.2f} of what is kept (loop "
                f"{row['loop_peak_bytes'] / row['kept_bytes']:.2f})",
                flush=True,
            )
            cases.append(row)
            if options.out:
                setting = {"threads": options.threads, "versions": versions(torch.device("cpu"))}
                OUT.write_text(json.dumps({**setting, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
