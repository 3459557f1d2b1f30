"""A search for the best settings of methods, on held-out training images."""

from forgetless.launch.search.benches import NOT_SEARCHED, NamedRuns
from forgetless.launch.search.chosen import best_configs
from forgetless.launch.search.record import (
    SEARCH_FILE,
    Choice,
    Search,
    Trial,
    load_search,
)
from forgetless.launch.search.samplers import SAMPLERS, TPE, Grid, SettingsSampler
from forgetless.launch.search.space import Candidate, described, searchable
from forgetless.launch.search.tune import (
    SEARCH_SEEDS,
    TRIALS,
    OnTrial,
    candidates_for,
    check_held_out,
    held_out_images,
    new_search,
    protocol_of,
    run_search,
    sampler_for,
    search_folder,
    settings_for,
    tune,
    warn_of_other_code,
)

__all__ = [
    "NOT_SEARCHED",
    "SAMPLERS",
    "SEARCH_FILE",
    "SEARCH_SEEDS",
    "TPE",
    "TRIALS",
    "Candidate",
    "Choice",
    "Grid",
    "NamedRuns",
    "OnTrial",
    "Search",
    "SettingsSampler",
    "Trial",
    "best_configs",
    "candidates_for",
    "check_held_out",
    "described",
    "held_out_images",
    "load_search",
    "new_search",
    "protocol_of",
    "run_search",
    "sampler_for",
    "search_folder",
    "searchable",
    "settings_for",
    "tune",
    "warn_of_other_code",
]
