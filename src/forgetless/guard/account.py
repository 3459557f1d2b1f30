"""What a guard has done, as plain values for its page: tasks, layers, numbers, warnings, advice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from forgetless.guard.drift import Score
from forgetless.guard.history import History
from forgetless.guard.report import MemoryReport, Stats
from forgetless.methods import Method
from forgetless.support.provenance import __version__

_BLOCKED = 0.8  # share of a task's progress from which the page advises to protect less
_PULL = 1.0


def account(
    method: Method[Any],
    model: str,
    *,
    steps: int,
    shapes: Mapping[str, tuple[int, ...]],
    free: Mapping[str, int],
    missed: Sequence[str],
    memory: MemoryReport,
    stats: Stats,
    kept: Mapping[int, int],
    scores: Mapping[int, Score],
    history: History,
    has_moving_statistics: bool,
) -> dict[str, Any]:
    """All of it, as JSON values.

    Arguments:
        method: the guard's.
        model: the name of the model's class.
        steps: taken in all.
        shapes: of the protected parameters.
        free: trained parameters that are not protected, with their sizes.
        missed: those of them that should be.
        memory: what is stored.
        stats: of the present task, with the drift as measured now.
        kept: samples kept of each task for the drift.
        scores: on held-out samples, by task.
        history: what was measured before.
        has_moving_statistics: whether training updates statistics that change the outputs.
    """
    p = sum(prod(shape) for shape in shapes.values())
    drifts = {one.task: one for one in stats.drift.tasks} if stats.drift else {}
    tasks = []
    for number, stored in enumerate(memory.tasks, 1):
        drift = drifts.get(number)
        tasks.append(
            {
                "number": number,
                "step": dict(history.stored).get(number),
                "kept": kept.get(number, 0),
                **asdict(stored),
                "drift": None if drift is None else asdict(drift),
                "is_forgotten": drift is not None and drift.is_forgotten,
                "held_out": asdict(scores[number]) if number in scores else None,
                "before": [list(one) for one in history.scores.get(number, [])],
            }
        )
    return {
        "version": __version__,
        "method": method.label or method.name,
        "settings": {key: str(value) for key, value in vars(method).items()},
        "model": model,
        "projects": method.acts_on == "update",
        "protects": method.protects,
        "steps": steps,
        "taken": stats.steps,
        "tasks": tasks,
        "layers": [
            {
                "name": name,
                "shape": list(shape),
                "count": prod(shape),
                "bytes": memory.layers.get(name),
                "removed": stats.layers.get(name) if stats.steps else None,
            }
            for name, shape in shapes.items()
        ],
        "free": [{"name": name, "count": size} for name, size in free.items()],
        "parameters": p,
        "memory": {
            "storage": memory.storage,
            "bytes": memory.bytes,
            "directions": memory.directions if method.keeps_directions else None,
            "share": memory.share,
            "drift_check": memory.drift_check,
            "notes": list(memory.notes),
        },
        "now": stats.metrics(),
        "moments": [asdict(moment) for moment in history.moments],
        "stored": [list(one) for one in history.stored],
        "warnings": [{"step": step, "text": text} for step, text in history.warnings],
        "advice": list(_advice(method, stats, tasks, missed, kept, has_moving_statistics)),
    }


def _advice(
    method: Method[Any],
    stats: Stats,
    tasks: Sequence[Mapping[str, Any]],
    missed: Sequence[str],
    kept: Mapping[int, int],
    has_moving_statistics: bool,
) -> Iterator[str]:
    """What to do about what was measured, a sentence each."""
    if not tasks:
        yield (
            "Nothing is protected yet: call guard.end_task(loader) when a task is learned, or "
            "guard.protect(data) for what the model can do already."
        )
        return
    forgotten = [str(task["number"]) for task in tasks if task["is_forgotten"]]
    if forgotten:
        one = len(forgotten) == 1
        which = f"Task {forgotten[0]} is" if one else f"Tasks {', '.join(forgotten)} are"
        ways = [method.advice(more=True), "lower the learning rate", "use another method"]
        if has_moving_statistics:
            ways.insert(0, "keep the statistics of batch norm by freeze_batch_norm=True")
        yield f"{which} being forgotten: {', or '.join(filter(None, ways))}."
    hinders = (stats.blocked or 0.0) > _BLOCKED or (stats.pull or 0.0) > _PULL
    if hinders and method.protects:
        less = method.advice(more=False) or "store less"
        yield (
            f"Little of the new task can be learned: if its score is poor, {less}, train longer, "
            "or protect fewer parameters (params)."
        )
    if missed and method.protects:
        more = f" and {len(missed) - 1} more" if missed[1:] else ""
        yield (
            f"{missed[0]}{more} is trained and not protected: call guard.adopt(model, optimizer), "
            "or choose by params= what is protected if that is meant."
        )
    if not kept:
        yield (
            "Nothing tells whether tasks are forgotten: let the guard keep samples "
            "(drift_samples), or give it held-out data, guard.report(path, held_out=[loader, …])."
        )
    if not forgotten and not hinders:
        yield "No task is being forgotten and the new one has room: there is nothing to do."
