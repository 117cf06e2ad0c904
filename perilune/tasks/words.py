"""Words to fill problems with. Tuples named NEW_* are kept from training and used in structural problems only.

Made-up words (`made_up`) are in every split: with them a model has to copy what it reads, not recall it.
"""

import re
from collections.abc import Iterable
from random import Random
from typing import Final

from perilune.tasks.problem import pick


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: Final = listed("""
    Alice Ben Carla David Emma Felix Grace Henry Irene Jack Karen Leo Maria Noah Olivia Paul Rosa Sam Tina Victor
    Wendy Xavier Yara Adam Bella Chris Diana Eric Fiona George Hannah Ivan Julia Kevin Laura Martin Nina Oscar Petra
    Robert Sara Tom Ursula Walter Zoe Anna Boris Clara Daniel Elena Frank Gina Hugo Ida James Kate Lucas Mia Nora
    Otto Pia Ralf Sofia Theo Vera Will Amir Bao Chen Dara Esra Farid Goro Hana Imani Jin Kofi Lin Mei Nadia Omar
    Priya Ravi Sana Tariq Uma Wei Yuki Zara Aiko Bilal Carlos Dmitri Eva Fatima Gustav Helga Ines Jorge Kenji Luisa
""")
WOMEN: Final = listed("""
    Alice Carla Emma Grace Irene Karen Maria Olivia Rosa Tina Wendy Yara Bella Diana Fiona Hannah Julia Laura Nina Petra
    Sara Ursula Zoe Anna Clara Elena Gina Ida Kate Mia Nora Pia Sofia Vera Hana Nadia Priya Sana Uma Zara Aiko Eva
    Fatima Helga Ines Luisa Mei Dara Esra Imani Lin
""")
NEW_NAMES: Final = listed("Agnes Bruno Celia Dexter Edith Floyd Greta Hector Ingrid Jonas Kira Lionel Mabel Nigel")
SURNAMES: Final = listed("""
    Smith Jones Brown Wilson Taylor Clark Lewis Walker Hall Young King Wright Hill Green Baker Adams Nelson Carter
    Mitchell Turner Parker Evans Collins Stewart Morris Rogers Cook Morgan Bell Murphy Bailey Cooper Ward Kelly Gray
    Kim Patel Singh Khan Tanaka Sato Novak Kowalski Silva Rossi Garcia Lopez Weber Fischer Dubois Jensen Ivanov
""")
CITIES: Final = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Warsaw", "Lisbon", "Athens", "Oslo", "Helsinki",
    "Dublin", "Brussels", "Budapest", "Beijing", "Shanghai", "Tokyo", "Osaka", "Seoul", "Delhi", "Mumbai", "Bangkok",
    "Hanoi", "Singapore", "Jakarta", "Manila", "Sydney", "Melbourne", "Cairo", "Lagos", "Nairobi", "Toronto", "Boston",
    "Chicago", "Seattle", "Denver", "Dallas", "Miami", "Lima", "Bogota", "Santiago", "Havana", "Zurich", "Geneva",
    "Milan", "Naples", "Munich", "Hamburg", "Lyon", "Porto", "Kyoto", "Dubai", "Istanbul", "Moscow", "Riga", "Tallinn",
    "San Francisco", "New York", "Los Angeles", "Hong Kong", "Mexico City", "Buenos Aires", "Cape Town", "Tel Aviv",
)  # fmt: skip
OBJECTS: Final = listed("""
    apples books pencils marbles coins stamps cards stickers shells stones eggs oranges pears plums cookies cakes
    bottles cups plates spoons chairs tables lamps candles flowers roses tulips trees seeds boxes bags hats shirts
    socks shoes gloves scarves buttons beads ropes nails screws bolts bricks tiles tickets photos maps letters
    postcards magazines pens crayons brushes balls toys dolls puzzles kites balloons ribbons badges keys locks
    clocks watches phones cables batteries bulbs mirrors towels pillows blankets lemons mangoes melons grapes
    cherries carrots onions potatoes tomatoes peppers beans nuts rolls loaves muffins pies sandwiches fish birds
    horses sheep goats ducks cows bees rabbits kittens puppies frogs turtles cars bikes boats trains trucks robots
    rulers notebooks folders envelopes coupons tokens medals trophies diamonds pearls pebbles leaves
""")
NEW_OBJECTS: Final = listed("""
    apricots lanterns whistles pumpkins acorns feathers magnets thimbles cushions walnuts helmets marigolds
""")
CONTAINERS: Final = listed("boxes bags baskets jars shelves crates trays drawers packs cases sacks rows bins piles")
NOUNS: Final = listed("""
    weather invoice order user account message email file folder report ticket flight hotel room table car train bus
    route map photo video song playlist album book article recipe meal restaurant menu product price stock payment
    refund coupon discount cart parcel shipment address contact customer supplier employee team project task note
    reminder alarm timer event meeting calendar appointment booking reservation visa passport license contract
    policy claim loan budget salary tax bill receipt transfer balance card wallet currency rate share fund bond
    market forecast temperature humidity wind storm tide sensor device lamp heater fan door lock window camera
    speaker thermostat vacuum robot drone engine battery charger cable server database table_row query index backup
    log metric alert deployment container image branch commit issue release build test package module function
    variable key token password session role group permission profile avatar post comment like follower channel
    thread poll survey form quiz exam course lesson student teacher grade school library patient doctor nurse
    prescription symptom diagnosis vaccine workout diet sleep step heartbeat pet dog cat plant garden crop field
    farm harvest animal species planet star galaxy orbit satellite rocket launch crew mission country city street
    bridge river mountain lake island park museum ticket_office concert match score player league tournament coach
    stadium game level badge word sentence paragraph translation summary dictionary language font color theme page
    site link cookie domain certificate printer document slide spreadsheet chart
""")
NEW_NOUNS: Final = listed("""
    aquarium auction barometer blueprint bracelet caravan cathedral census chandelier circuit compass costume
    dashboard diploma elevator escrow ferry festival fountain furnace gallery glacier greenhouse harbor inventory
    kiosk laundry lighthouse locker lottery manuscript mortgage observatory orchard parachute pension petition
    pipeline podcast pottery quarry radiator raffle referendum reservoir satchel scaffold sculpture shuttle
    submarine subscription telescope tenant treaty turbine tunnel vineyard voucher warehouse windmill
""")
ADJECTIVES: Final = listed("""
    red blue green yellow black white grey brown orange purple silver golden small large tiny huge old new young
    fresh warm cold hot dry wet quiet loud fast slow bright dark soft hard light heavy sweet sour simple quick round
    flat narrow wide deep plain rare common lucky brave calm clever gentle happy proud wild
""")
PLAIN: Final = listed("""
    apple river table garden window silver stone bridge paper music winter summer market planet forest candle pencil
    engine island mirror bottle ladder pocket rocket button copper cotton dragon kitchen letter marble orange pepper
    rabbit saddle school shadow spring street sugar ticket tiger timber valley velvet village violin walnut water
    wheel yellow anchor basket beacon blossom breeze canyon carpet castle cherry circle cloud coffee corner desert
    dinner eagle ember falcon feather fiddle flame flower guitar hammer helmet honey jacket jungle lantern lemon
    lion maple meadow melon mountain needle ocean olive otter oyster palace parrot pearl pillow pirate pony prairie
    puzzle quartz raven ribbon salmon scarlet signal sparrow spider storm sunset temple thunder tulip turtle
    umbrella vessel wagon whale willow wizard wolf zebra
""")
_ONSETS: Final = listed("b c d f g h j k l m n p r s t v w z br cl dr fl gr pl pr sh sl st th tr ch kr")
_VOWELS: Final = listed("a e i o u a e i o a e ai ea ou")
_CODAS: Final = ("", "", "", "", "n", "r", "l", "s", "t", "m", "k", "x", "nd", "st", "rk")


_learnt: tuple[str, ...] = ()
_REAL = re.compile(r"[a-z]{4,12}")
_OPENINGS: Final = listed("""
    in out over under un re pre de dis inter trans sub super mis non anti fore up down by on off al ab ad con com per
    pro sur para micro multi semi auto bio geo hydro tele photo hy vi ro mo so te fl gr st sc sp th wh qu kn gn
""")
_STEMS: Final = listed("""
    script form port struct dict ject vers sign port press tract scope graph log gram cur duct fer mit pos spec spir
    ten vent vid voc act fab flav hab cult cred fact fin flex gen grad lat loc man mem mov nat nov ord part plac plan
    prov quest rad sal sens serv sist sol son tang temp tend term test text tim tor turb urb vac val ven vit viv
""")
_ENDINGS: Final = listed("""
    tion sion ment ness ity ure age ance ence our or er ar al ic ive ous ful less able ible ist ism ion ade ude ette
    et y ery ory ary ate ite ote ine one ane ling ship hood ward way work land line mark stone wood box ing ed es
""")


def learn(texts: Iterable[str], kept: Iterable[str]) -> int:
    """From now on, in this process, `made_up` also gives words (lowercase runs) of these texts; returns how many.

    For training: copying is learnt from words of every spelling. Words that hold one of `kept` are left out:
    structural problems are made of those.
    """
    global _learnt
    barred = tuple(kept)
    words = sorted({w for text in texts for w in _REAL.findall(text)})
    _learnt = tuple(w for w in words if not any(k in w for k in barred))
    return len(_learnt)


def made_up(rng: Random) -> str:
    """A pronounceable word of two or three syllables that means nothing (but see `learn`)."""
    r = rng.random
    if _learnt and (roll := r()) < 0.7:
        if roll < 0.5:
            return _learnt[int(r() * len(_learnt))]
        return (
            _OPENINGS[int(r() * len(_OPENINGS))]
            + (_STEMS[int(r() * len(_STEMS))] if r() < 0.7 else "")
            + _ENDINGS[int(r() * len(_ENDINGS))]
        )
    word = ""
    for _ in range(2 if r() < 0.6 else 3):
        word += _ONSETS[int(r() * len(_ONSETS))] + _VOWELS[int(r() * len(_VOWELS))]
    return word + _CODAS[int(r() * len(_CODAS))]


def invents_more() -> bool:
    """Whether `learn` was called: names are then made up more often, to learn copying rather than a list of names."""
    return bool(_learnt)


def compound(rng: Random) -> str:
    """A thing in two or three words, e.g. "garden hose": a model must not copy the first word only."""
    words = [any_word(rng), pick(rng, PLAIN)] if rng.random() < 0.8 else [pick(rng, ADJECTIVES), any_word(rng)]
    return " ".join([*words, pick(rng, PLAIN)] if rng.random() < 0.2 else words)


def any_word(rng: Random) -> str:
    roll = rng.random()
    return made_up(rng) if roll < 0.4 else pick(rng, PLAIN) if roll < 0.8 else pick(rng, ADJECTIVES)
