"""Prompts for a chat model: every second one to protect, the others to ask afterwards."""

COUNTRIES = (
    "France:Paris Italy:Rome Spain:Madrid Germany:Berlin Japan:Tokyo China:Beijing Egypt:Cairo "
    "Greece:Athens Norway:Oslo Sweden:Stockholm Poland:Warsaw Portugal:Lisbon Austria:Vienna "
    "Hungary:Budapest Ireland:Dublin Cuba:Havana Peru:Lima Chile:Santiago Canada:Ottawa "
    "Russia:Moscow Turkey:Ankara Iran:Tehran Iraq:Baghdad Kenya:Nairobi Finland:Helsinki "
    "Denmark:Copenhagen Belgium:Brussels Thailand:Bangkok Vietnam:Hanoi Jamaica:Kingston"
)
THINGS = (
    "a volcano, photosynthesis, a prime number, gravity, a rainbow, democracy, a black hole, DNA, "
    "inflation, an atom, a glacier, an enzyme, a haiku, a virus, jazz, the moon, a comet, "
    "magnetism, a vaccine, an earthquake, a metaphor, evolution, a database, electricity, a "
    "fossil, philosophy, a hurricane, an algorithm, a desert, a mammal, friction, an opera"
)
WISHES = (
    "Write a Python function that reverses a list.; Write a short poem about the sea.; Explain how "
    "to boil an egg.; Give three tips for better sleep.; Use the word bridge in a sentence.; Name "
    "four animals of the forest.; Why is the sky blue?; Write a Python function that adds numbers."
)


def prompts(first: int) -> list[str]:
    """Every second prompt, from 0 or from 1."""
    things, wishes = THINGS.split(", "), WISHES.split("; ")
    return [*(f"What is {thing}?" for thing in things[first::2]), *wishes[first::2]]


def capitals(first: int) -> dict[str, str]:
    """Every second question about a capital, with the answer."""
    pairs = (pair.split(":") for pair in COUNTRIES.split()[first::2])
    return {f"What is the capital of {country}?": city for country, city in pairs}
