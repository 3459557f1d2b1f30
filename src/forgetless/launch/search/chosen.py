"""From the file of a search to the configurations of runs with the best settings."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from forgetless.launch.runs import Config, resolve
from forgetless.launch.search.benches import NOT_SEARCHED
from forgetless.launch.search.record import Search
from forgetless.launch.search.space import options_of
from forgetless.methods import method_class
from forgetless.support.plugins import absolute, short_name
from forgetless.support.validation import ConfigError, ForgetlessWarning
from forgetless.trace.experiment import changed_settings


def best_configs(
    search: Search,
    scenario: str,
    methods: Sequence[str] | None,
    given: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
) -> list[Config]:
    """The configuration of each method with its best settings, on the test set.

    Arguments:
        search: of the same scenario, complete.
        scenario: its name, or my_file.py:tasks.
        methods: those to train; by default all that have a choice.
        given: settings of all runs by name: seeds, and others as they were searched with.
        own: options by method, as they were searched with.
    """
    file = search.path
    if search.status != "complete":
        raise ConfigError(f"{file} is unfinished: the same forgetless tune resumes the search")
    if absolute(scenario) != absolute(search.scenario):
        searched = short_name(search.scenario)
        raise ConfigError(f"{file} is a search on {searched}, not on {short_name(scenario)}")
    best = search.best
    sources = {search.methods[name]["source"]: name for name in search.methods}
    if methods is None:
        lost = [name for name in search.methods if name not in best]
        if lost:
            message = f"{', '.join(lost)} diverged with all settings in {file}, and is left out"
            warnings.warn(message, ForgetlessWarning, stacklevel=2)
        chosen = {source: name for source, name in sources.items() if name in best}
    else:
        chosen = {source: sources.get(source, method_class(source).name) for source in methods}
    for name in chosen.values():
        if name not in best:
            known = f"has no choice for {name}; there are {', '.join(best)}"
            raise ConfigError(f"{file} {known}")
    return [_config(search, name, source, given, own) for source, name in chosen.items()]


def _config(
    search: Search,
    name: str,
    source: str,
    given: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
) -> Config:
    known = {f.name for f in fields(Config)} - {"scenario", "method", "options"}
    settings = {**search.settings, **search.given}
    settings = {n: v for n, v in settings.items() if n in known and n not in NOT_SEARCHED}
    choice, options = search.best[name], options_of(method_class(source))
    of_method = {**search.methods[name]["options"]}
    for setting, value in choice.settings.items():
        (of_method if setting in options else settings)[setting] = value
    as_searched = resolve(search.scenario, source, of_method, **settings)
    mine = {n: given.get(n, value) for n, value in of_method.items()} | dict(own.get(source, {}))
    found = resolve(search.scenario, source, mine, **{**settings, **given})
    there, here = (
        {n: v for n, v in config.as_dict().items() if n not in NOT_SEARCHED}
        for config in (as_searched, found)
    )
    difference = changed_settings(there, here)
    if difference:
        raise ConfigError(f"{search.path} was searched with other settings: {difference}")
    return found
