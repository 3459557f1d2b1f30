"""Texts that come with every Python, divided into sequences of characters."""

import argparse
import inspect
import subprocess
import typing
import unicodedata
from pydoc_data.topics import topics

import torch
from torch import Tensor

LENGTH = 32  # characters per sequence
CHARACTERS = 128  # ASCII


def prose() -> Tensor:
    """The reference manual of Python, (n, LENGTH)."""
    return _sequences("".join(topics.values()))


def code() -> Tensor:
    """Modules of the standard library, (n, LENGTH)."""
    return _sequences("".join(map(inspect.getsource, (argparse, inspect, subprocess, typing))))


def character_names() -> Tensor:
    """The names of Unicode's characters, such as GREEK SMALL LETTER PHI, (n, LENGTH)."""
    names = (unicodedata.name(chr(i), "") for i in range(0x3000))
    return _sequences("\n".join(filter(None, names)))


def split(sequences: Tensor, test: int = 300) -> tuple[Tensor, Tensor]:
    """Training and test sequences, shuffled in the same way each time."""
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
    return sequences[order[test:]], sequences[order[:test]]


def _sequences(text: str) -> Tensor:
    characters = torch.tensor(list(text.encode("ascii", "ignore")))
    return characters[: len(characters) // LENGTH * LENGTH].view(-1, LENGTH)
