"""English words for keys, and things that are drawn without repetition."""

import random
import string
import uuid
from collections.abc import Callable, Iterator
from itertools import product

from penstock.core.errors import ConfigError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES: tuple[str, ...] = _words(
    """
    agile ancient arctic ashen autumn azure bashful blunt bold brave brisk broad bronze bumpy calm
    candid careful cheery chilly civil clever cloudy coarse cosy crimson crisp curious curly dainty
    damp daring deep dense distant dizzy dreamy dusty eager early earnest elder empty fabled faint
    famous fancy fearless fertile fierce floral fluffy fond formal fragile frosty frugal gentle
    giddy glad gloomy glossy golden graceful grand grassy grateful hasty hazy hearty heavy hidden
    hollow honest humble idle jagged jolly keen kindly lanky lavish leafy lively lofty lonely loyal
    lucid lunar marble mellow merry mighty misty modest muddy narrow nimble noble nutty opaque pale
    patient placid plain polite proud quaint quick quiet radiant rapid restless rigid rosy rough
    rugged rusty sandy scarlet serene shady sharp shiny silent silky simple sleepy slender smoky
    smooth snowy solar solid sparse spiral spotted stable starry steady stern sturdy subtle sunny
    swift tame tender thirsty thorny tidy timid tranquil urban vast velvet vivid warm wary wavy
    weary wild windy wise woolly young zesty
    """
)
NOUNS: tuple[str, ...] = _words(
    """
    acorn anchor anvil apricot arrow badger balcony bamboo banner barrel basket beacon bellows
    bench bicycle biscuit blanket blossom boulder bracelet bramble bridge broom bucket button
    cabin cactus camel candle canoe canyon carpet castle cavern cedar cellar chapel cherry chimney
    cinder circus clover cobbler compass copper coral cottage cradle crayon cricket crystal cupboard
    curtain cushion cymbal daisy dolphin donkey dragon drawer drum eagle easel elbow ember falcon
    feather fiddle finch flagon flute forest fountain galaxy garden garlic geyser glacier glove
    goblet gondola granite guitar hammer hammock harbor harvest hazel hedge helmet heron hinge
    honey hornet igloo inkwell island ivory jacket jasmine jigsaw juniper kernel kettle kitten
    ladder lagoon lantern lemon lettuce lighthouse lizard locket magnet mandolin mango mantle maple
    marigold meadow melon mirror mitten monsoon mosaic mountain mushroom napkin needle nutmeg oasis
    ocean olive onion orchard otter oyster paddle pancake parcel parrot pasture peacock pebble
    pelican pepper piano pigeon pillow pirate planet plum pocket pony prairie pumpkin puppet quarry
    quill rabbit raft ribbon river robin rocket saddle sailor salmon sandal scarf shovel sparrow
    spindle spruce squirrel statue sunset swan tailor teapot temple thimble thistle thunder
    tiger trellis trumpet tulip turnip turtle umbrella valley vessel village violin wagon walnut
    walrus whistle willow window
    """
)
_SYLLABLES = tuple(a + b for a, b in product("bdfklmnprstvz", "aeiou"))


def key_deck(rng: random.Random) -> Iterator[str]:
    """Different keys of an adjective and a noun (`quiet-harbor`), in random order.

    Raises:
        ConfigError: more keys are taken than there are.
    """
    total = len(ADJECTIVES) * len(NOUNS)
    for pick in rng.sample(range(total), total):
        yield f"{ADJECTIVES[pick // len(NOUNS)]}-{NOUNS[pick % len(NOUNS)]}"
    raise ConfigError(f"the prompt is too long for this task: it needs more than {total:,} keys")


def coined_word_deck(rng: random.Random) -> Iterator[str]:
    """Different coined words of three syllables (`bamilo`), so that none is part of another."""
    total = len(_SYLLABLES) ** 3
    for pick in rng.sample(range(total), total // 4):
        first, rest = divmod(pick, len(_SYLLABLES) ** 2)
        second, third = divmod(rest, len(_SYLLABLES))
        yield _SYLLABLES[first] + _SYLLABLES[second] + _SYLLABLES[third]
    raise ConfigError(f"the prompt is too long for this task: it needs over {total // 4:,} words")


def different(draw: Callable[[], str]) -> Iterator[str]:
    """What `draw` gives, without repetitions, for ever."""
    seen: set[str] = set()
    while True:
        thing = draw()
        if thing not in seen:
            seen.add(thing)
            yield thing


def digits(rng: random.Random, count: int) -> str:
    """A number of `count` digits that does not start with 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def letters(rng: random.Random, count: int, alphabet: str = string.ascii_lowercase) -> str:
    """A random string of `count` letters."""
    return "".join(rng.choices(alphabet, k=count))


def random_uuid(rng: random.Random) -> str:
    """A version 4 UUID, lower case, with hyphens."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
