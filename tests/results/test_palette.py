"""Colours as eyes see them: contrast by WCAG 2.1, distance in OKLab (Ottosson 2020) of what is left of a colour without
one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1)."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml

from synergy_runs.outputs.facts import AS_LOGGED
from synergy_runs.outputs.report.figures import DARK_PAGE, LIGHT_PAGE, LOGGED, SIZE_TONES, TONES, looks, tone_of

ROOT = Path(__file__).resolve().parents[2]
LEAST_CONTRAST = 3.0  # WCAG 2.1, 1.4.11: graphics
# In OKLab two colours are just told apart at 0.02 (CSS Color 4, section on deltaEOK).
LEAST_DISTANCE = 0.08
EYES = {
    "all cones": np.eye(3),
    "no long": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no middle": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no short": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_TO_CONES = np.array(
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
     [0.0883024619, 0.2817188376, 0.6299787005]]
)  # fmt: skip
_TO_LAB = np.array(
    [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
     [0.0259040371, 0.7827717662, -0.8086757660]]
)  # fmt: skip


def linear(colour):
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def distance(one, other, eyes):
    labs = [_TO_LAB @ np.cbrt(_TO_CONES @ np.clip(eyes @ linear(each), 0, 1)) for each in (one, other)]
    return float(np.linalg.norm(labs[0] - labs[1]))


def test_measures_are_the_published_ones():
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the well-known grey that just fails 4.5:1
    assert distance("#ffffff", "#000000", np.eye(3)) == pytest.approx(1.0, abs=1e-4)
    red_green = [distance("#ff0000", "#00a000", EYES[eyes]) for eyes in ("all cones", "no middle")]
    assert red_green[1] < red_green[0] / 2


@pytest.mark.parametrize("tones", [(*TONES, LOGGED), SIZE_TONES], ids=["policies and the log", "sizes"])
@pytest.mark.parametrize(("side", "page"), [("light", LIGHT_PAGE), ("dark", DARK_PAGE)])
def test_colours_stand_out_from_the_page_and_from_each_other(tones, side, page):
    colours = [getattr(tone, side) for tone in tones]
    assert min(contrast(each, page) for each in colours) >= LEAST_CONTRAST
    for eyes in EYES.values():
        assert min(distance(*pair, eyes) for pair in itertools.combinations(colours, 2)) >= LEAST_DISTANCE


def test_sizes_of_jobs_differ_in_grey():
    for side in ("light", "dark"):
        # CIE lightness; 2 to 3 are just told apart side by side.
        grey = [116 * np.cbrt(luminance(getattr(tone, side))) - 16 for tone in SIZE_TONES]
        assert min(np.abs(np.diff(grey))) > 7


def test_a_policy_has_one_look_whoever_stands_beside_it_and_the_log_one_that_no_policy_has():
    assert [tone_of(name) for name in ("fifo", "srtf", "sia", "synergy", "of nobody")] == [8, 1, 7, 4, 3]
    alone = looks(["synergy"])["synergy"]
    for others in (["fifo"], ["mine", "yours", "sia(growth=4)"], [f"p{number}" for number in range(40)]):
        assert looks([*others, "synergy"])["synergy"].tone is alone.tone
    names = [AS_LOGGED, *(f"policy {number}" for number in range(40))]
    found = looks(names)
    assert list(found) == names
    own = found.pop(AS_LOGGED)
    assert own.tone not in [each.tone for each in found.values()]
    assert own.mark.marker not in [each.mark.marker for each in found.values()]


def test_no_two_policies_look_alike_without_colour():
    names = [f"policy {number}" for number in range(2 * len(TONES))]
    assert len({(look.mark.marker, look.hollow) for look in looks(names).values()}) == len(names)
    assert all(looks(names[:many]).keys() == set(names[:many]) for many in range(len(names)))


def test_policies_compared_by_default_have_colours_of_their_own():
    names = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))["policy"]
    assert len({look.tone for look in looks(names).values()}) == len(names) > 5


def test_up_to_ten_policies_have_ten_colours():
    assert tone_of("easy") == tone_of("area")
    for names in (["easy", "area"], [f"policy {number}" for number in range(len(TONES))]):
        assert len({look.tone for look in looks(names).values()}) == len(names)


def test_every_mark_can_be_drawn():
    from matplotlib.markers import MarkerStyle

    for tone in (*TONES, LOGGED):
        assert MarkerStyle(tone.printed)
