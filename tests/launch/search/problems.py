"""Options without a method, and scores without training."""

from dataclasses import fields, make_dataclass

from forgetless.launch.search.space import Dimension, key
from forgetless.support.validation import option


def dimension(values, accepted, name="x"):
    made = make_dataclass("Made", [(name, object, option(values[0], "x", accepted=accepted))])
    return Dimension(name, tuple(values), fields(made)[0])


def searched(sampler, score):
    """All settings that a sampler proposes where the scores are a function, and its rounds."""
    known, rounds = {}, []
    for new in sampler.rounds(lambda settings: known.get(key(settings))):
        rounds.append(len(new))
        known.update({key(settings): score(settings) for settings in new})
    return known, rounds
