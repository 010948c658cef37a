"""The colours of the ledger's parts are distinguishable, for all kinds of vision, in both themes."""

import math
from itertools import combinations, product

import pytest

from vramledger.model.snapshot import State
from vramledger.views.colours import BACKGROUND, GRAFANA, PARTS

VISIONS = {
    # Linear RGB as seen with one kind of cone missing: Machado, Oliveira and Fernandes 2009, severity 1.
    "every cone": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip
Triple = tuple[float, float, float]
THEMES = ("light", "dark")
APART = 12.0
"""CIEDE2000; adjacent colours are distinguishable from about 2 on, colours in a legend from about 10."""

SHARED_APART = 9.5
"""The same for the newest of the dashboards' colours: no search found one that is further from all others and
stands out from both themes."""


def linear(colour: str) -> Triple:
    """Return a colour as linear sRGB."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return _linear(red), _linear(green), _linear(blue)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def seen(colour: str, vision: str) -> Triple:
    """Return a colour as CIE Lab, as a kind of vision sees it."""
    shares = (sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in VISIONS[vision])
    red, green, blue = (min(1.0, max(0.0, each)) for each in shares)
    x = _root((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047)
    y = _root(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    z = _root((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _root(share: float) -> float:
    return share ** (1 / 3) if share > 216 / 24389 else (24389 / 27 * share + 16) / 116


def distance(one: Triple, other: Triple) -> float:
    """Return CIEDE2000."""
    mean = (math.hypot(*one[1:]) + math.hypot(*other[1:])) / 2
    stretch = 1.5 - 0.5 * math.sqrt(mean**7 / (mean**7 + 25**7))
    a1, a2 = one[1] * stretch, other[1] * stretch
    c1, c2 = math.hypot(a1, one[2]), math.hypot(a2, other[2])
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for b, a in ((one[2], a1), (other[2], a2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn) / 2)
    light, chroma, at = (one[0] + other[0]) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360
    weight = (
        1
        - 0.17 * math.cos(math.radians(at - 30))
        + 0.24 * math.cos(math.radians(2 * at))
        + 0.32 * math.cos(math.radians(3 * at + 6))
        - 0.20 * math.cos(math.radians(4 * at - 63))
    )
    s_light = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    s_chroma, s_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    rotation = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7))
    rotation *= math.sin(math.radians(60 * math.exp(-(((at - 275) / 25) ** 2))))
    d_light, d_chroma, d_hue = (other[0] - one[0]) / s_light, (c2 - c1) / s_chroma, hue / s_hue
    return math.sqrt(d_light**2 + d_chroma**2 + d_hue**2 + rotation * d_chroma * d_hue)


def test_the_distance_is_the_published_one() -> None:
    """Our CIEDE2000 equals the figures of Sharma, Wu and Dalal (2005) for their first and a far pair."""
    assert distance((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert distance((50.0, 2.5, 0.0), (73.0, 25.0, -18.0)) == pytest.approx(27.1492, abs=1e-4)


def test_every_part_of_a_ledger_has_a_look() -> None:
    """All parts have a colour, in both sets in one order; wasted states differ by texture too."""
    others = {"unattributed", "operating_system", "driver_reserved", "free"}
    assert set(PARTS) == {state.value for state in State} | others
    states = "active idle stopped orphaned zombie stuck dead".split()
    assert len({PARTS[state].texture for state in states}) == len(states)
    assert list(GRAFANA) == list(PARTS)


PALETTES = {theme: {part: getattr(look, theme) for part, look in PARTS.items()} for theme in THEMES}
PALETTES["both"] = {part: colour for part, colour in GRAFANA.items() if part != "free"}
"""Each part's colour in a theme, and the dashboards', which are the same in both."""


@pytest.mark.parametrize(("palette", "vision"), list(product(PALETTES, VISIONS)))
def test_any_two_parts_can_be_told_apart(palette: str, vision: str) -> None:
    """For each kind of vision any two parts are far from each other, in each theme and on a dashboard."""
    looks = {part: seen(colour, vision) for part, colour in PALETTES[palette].items()}
    for one, other in combinations(looks, 2):
        newest = palette == "both" and "operating_system" in (one, other)
        assert distance(looks[one], looks[other]) >= (SHARED_APART if newest else APART), (one, other)


@pytest.mark.parametrize(
    ("palette", "ground"), [*zip(THEMES, BACKGROUND, strict=True), *(("both", each) for each in BACKGROUND)]
)
def test_every_part_stands_out_from_its_ground(palette: str, ground: str) -> None:
    """All parts except free have a contrast of 3:1 to the panel, as WCAG requires for graphics."""
    low = {part for part, colour in PALETTES[palette].items() if contrast(colour, ground) < 3}
    assert low == {"free"} & PALETTES[palette].keys()
