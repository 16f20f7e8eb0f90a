"""The pictures of the documents show what the simulator says today, and say it in words."""

import html
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from examples import nearly

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, PICTURES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


draw, choices, accuracy = _script("draw"), _script("choices"), _script("accuracy")
services = _script("services")


def text_of(name: str) -> str:
    return (PICTURES / f"{name}.svg").read_text(encoding="utf-8")


def made_of(name: str) -> str:
    (found,) = re.findall(r"<!-- data ([^;]+); ", text_of(name))
    return str(found)


def title_of(name: str) -> str:
    (words,) = re.findall(r"<title>(.*)</title>", text_of(name))
    return html.unescape(str(words))


@pytest.mark.parametrize("policy", draw.POLICIES)
def test_a_policy_s_picture_is_of_its_replay_today(policy):
    digest, _, ends = draw.made_of(draw.replay(policy)).partition(", ")
    for name in (policy, "latency") if policy == "rra" else (policy,):
        own, _, own_ends = made_of(name).partition(", ")
        assert own == digest and nearly(own_ends, ends), f"draw it anew: {draw.MAKE}"


def test_the_trade_off_is_what_is_planned_today():
    assert made_of("trade-off") == draw.digest(), f"draw it anew: {draw.MAKE}"
    (shown,) = re.findall(r"FT \(static batches\): .*?([\d.]+) at 11.5 s", title_of("trade-off"))
    assert draw.trade_off("ft", (11.5,)) == [pytest.approx(float(shown), rel=0.01)], (
        f"draw it anew: {draw.MAKE}")


def test_the_trade_off_names_the_policies_by_what_they_do():
    words = title_of("trade-off")
    assert "Sarathi" in words and "prefill-first" in words and "vLLM" not in words


def test_the_picture_of_arrivals_is_of_its_replay_today():
    (digest, _, ends), (own, _, own_ends) = (
        words.partition(", ") for words in (draw.made_of(services.toy()), made_of("arrivals")))
    assert own == digest and nearly(own_ends, ends), f"draw it anew: {services.MAKE}"


@pytest.mark.slow
@pytest.mark.parametrize("name", services.LINES)
def test_a_picture_of_a_service_is_what_is_replayed_today(name):
    assert made_of(name) == draw.digest(), f"draw it anew: {services.MAKE}"
    assert nearly(title_of(name), services.words_of(name, services.data(name))), (
        f"draw it anew: {services.MAKE}")


def test_the_picture_of_the_accuracy_is_of_the_committed_points():
    assert made_of("accuracy") == accuracy.made_of(), f"draw it anew: {accuracy.MAKE}"
    rows = accuracy.requests()
    assert title_of("accuracy") == accuracy.words_of(rows) and len(rows) == 236


@pytest.mark.slow
def test_all_of_the_trade_off_is_what_is_planned_today():
    data = {policy: draw.trade_off(policy) for policy in draw.TRADE_OFF_POLICIES}
    assert nearly(title_of("trade-off"), draw.trade_off_words(data)), f"draw it anew: {draw.MAKE}"


@pytest.mark.slow
@pytest.mark.parametrize("name", choices.CHOICES)
def test_a_picture_of_a_choice_is_what_is_planned_today(name):
    assert made_of(name) == draw.digest(), f"draw it anew: {choices.MAKE}"
    assert nearly(title_of(name), choices.words_of(name, choices.data(name))), (
        f"draw it anew: {choices.MAKE}")


def test_a_picture_of_a_choice_says_every_point_in_words():
    for name, choice in choices.CHOICES.items():
        (words,) = re.findall(r"<title>(.*)</title>", text_of(name))
        for label in choice.lines:
            (said,) = re.findall(rf"{label}: (.+?)(?:; |\.$)", words)
            assert len(said.split(", ")) == len(choice.across), label


def test_each_picture_has_words_and_a_place_in_the_documents():
    pages = "".join(page.read_text("utf-8") for page in (*ROOT.glob("docs/*.md"),
                                                         ROOT / "README.md"))
    pictures = sorted(path.stem for path in PICTURES.glob("*.svg"))
    assert pictures == sorted([*draw.POLICIES, "latency", "trade-off", "accuracy",
                               *choices.CHOICES, "arrivals", *services.LINES])
    for name in pictures:
        assert re.search(r"<title>\w.{40,}</title>", text_of(name))
        (words,) = set(re.findall(rf"!\[([^\]]+)\]\((?:docs/)?pictures/{name}\.svg\)", pages))
        assert len(words) > 30
