"""The command `forgetless doctor`: what is installed here, what is missing, and how to get it."""

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any, final

import typer
from rich.console import Console

from forgetless.support.provenance import __version__
from forgetless.support.validation import first_line, format_bytes

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_FOR_DEVELOPERS = "dev"


@final
@dataclass(frozen=True)
class Package:
    """A package that forgetless can use.

    Arguments:
        name: of the distribution.
        wanted: the versions that will do, such as ">=2.6".
        found: the installed version; None if there is none.
    """

    name: str
    wanted: str
    found: str | None

    @property
    def will_do(self) -> bool:
        """Whether it is installed and new enough."""
        least = re.search(r">=\s*([\d.]+)", self.wanted)
        if self.found is None or least is None:
            return self.found is not None
        return _numbers(self.found) >= _numbers(least[1])

    @property
    def state(self) -> str:
        """Its version, or what is wrong with it."""
        if self.found is None:
            return f"{self.name} is missing"
        return f"{self.name} {self.found}" + ("" if self.will_do else f", needs {self.wanted}")


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say what is installed here, and what is missing.

    Versions, devices and their memory, threads, datasets (read and verified) and where they are
    looked for, and the optional extras.
    """
    with Console(stderr=True).status("looking, and verifying the datasets"):
        found = examined()
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        _show(found)
    if found["broken"]:
        raise typer.Exit(2)


def examined() -> dict[str, Any]:
    """What the machine has, as JSON values; also where torch cannot be imported."""
    packages = _packages()
    core, extras = packages.pop("", []), packages
    broken = [package.state for package in core if not package.will_do]
    found: dict[str, Any] = {
        "versions": {"forgetless": __version__, "python": platform.python_version()}
        | {p.name: p.found for p in core},
        "extras": {
            name: {
                "installed": all(p.will_do for p in needed),
                "packages": [asdict(p) for p in needed],
                "install": f'pip install "forgetless[{name}]"',
            }
            for name, needed in extras.items()
        },
        "devices": [],
        "threads": {},
        "data": {},
    }
    try:
        found |= {"devices": _devices(), "threads": _threads(), "data": _data()}
    except ImportError as error:
        broken.append(f"torch or what it needs cannot be imported ({first_line(error)})")
    return found | {"broken": broken, "verdict": _verdict(found, broken)}


def _packages() -> dict[str, list[Package]]:
    """The packages of each extra, and under "" those that are always needed."""
    try:
        lines = requires("forgetless") or []
    except PackageNotFoundError:  # run from a checkout
        lines = []
    found: dict[str, list[Package]] = {"": []}
    for line in lines:
        asked = _REQUIREMENT.match(line)
        name, wanted = asked.groups() if asked else (line, "")
        extra = _EXTRA.search(line)
        if extra is None or extra[1] != _FOR_DEVELOPERS:
            packages = found.setdefault(extra[1] if extra else "", [])
            packages.append(Package(name, wanted.strip(" ()"), _installed(name)))
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version: (2, 6) of 2.6.0+cpu."""
    parts = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _devices() -> list[dict[str, Any]]:
    """The devices that training can use, with their bytes."""
    import torch

    from forgetless.support.memory import free_memory, total_memory

    graphics = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    names = {torch.device("cpu"): _processor()}
    names |= {torch.device("cuda", i): torch.cuda.get_device_name(i) for i in graphics}
    return [
        {
            "device": str(device),
            "name": name,
            "memory": _finite(total_memory(device)),
            "free": _finite(free_memory(device)),
        }
        for device, name in names.items()
    ]


def _processor() -> str:
    """The processor's name as its system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # a system without it
    return platform.processor() or platform.machine()


def _finite(count: float) -> int | None:
    return int(count) if count < float("inf") else None


def _threads() -> dict[str, Any]:
    import torch

    usable = getattr(os, "sched_getaffinity", None)
    names = ("FORGETLESS_THREADS", "OMP_NUM_THREADS")
    return {
        "processors": len(usable(0)) if usable else os.cpu_count(),
        "torch": torch.get_num_threads(),
        **{name: os.environ[name] for name in names if name in os.environ},
    }


def _data() -> dict[str, Any]:
    """The folders that are searched, and every dataset."""
    from forgetless.data.datasets import searched, status

    return {
        "searched": [str(folder) for folder in searched()],
        "datasets": {
            source.name: {
                "verified": source.available,
                "where": source.where,
                "bytes": source.bytes,
            }
            for source in status()
        },
    }


def _verdict(found: dict[str, Any], broken: list[str]) -> str:
    """One line: whether training can begin, on what, and what could be added."""
    if broken:
        return f"Not ready: {'; '.join(broken)}. Repair it by pip install --upgrade forgetless"
    *_, best = found["devices"]
    missing = [name for name, one in found["data"]["datasets"].items() if not one["verified"]]
    absent = [name for name, one in found["extras"].items() if not one["installed"]]
    lacks = [f"the datasets {', '.join(missing)}"] if missing else []
    lacks += [f"the extras {', '.join(absent)}"] if absent else []
    ready = f"Ready to train on {best['name']}"
    return ready + (f"; not here, and not always needed: {'; '.join(lacks)}" if lacks else "")


def _show(found: dict[str, Any]) -> None:
    for heading, lines in _sections(found):
        for number, (name, text) in enumerate(lines):
            typer.echo(f"{'' if number else heading:<10}{name:<20} {text}".rstrip())
    typer.echo(found["verdict"])


def _sections(found: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "versions", [(name, value or "missing") for name, value in found["versions"].items()]
    yield "devices", [(one["device"], _device_words(one)) for one in found["devices"]]
    yield "threads", [(name, str(value)) for name, value in found["threads"].items()]
    if found["data"]:
        datasets = found["data"]["datasets"].items()
        yield "data", [(name, _data_words(name, one)) for name, one in datasets]
        yield "", [("searched", " then ".join(found["data"]["searched"]))]
    yield "extras", [(name, _extra_words(one)) for name, one in found["extras"].items()]


def _device_words(one: dict[str, Any]) -> str:
    sizes = [None if one[key] is None else format_bytes(one[key]) for key in ("memory", "free")]
    return f"{one['name']}, {sizes[0] or 'unknown'} of memory, {sizes[1] or 'unknown'} free"


def _data_words(name: str, one: dict[str, Any]) -> str:
    if one["verified"]:
        return f"verified, {format_bytes(one['bytes'])}, {one['where']}"
    return f"{one['where']}; forgetless data fetch {name}"


def _extra_words(one: dict[str, Any]) -> str:
    packages = [Package(**package) for package in one["packages"]]
    words = ", ".join(package.state for package in packages)
    return words if one["installed"] else f"{words}; {one['install']}"
