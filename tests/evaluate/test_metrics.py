"""The measures on cases worked out by hand."""

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.metrics import (
    METRICS,
    exact_match,
    leading_steps,
    metric_called,
    normalise,
    string_match_all,
    string_match_part,
    token_f1,
)
from penstock.evaluate.tasks.sample import Sample, judge, score


def test_exact_match_forgives_white_space_only() -> None:
    assert exact_match("  a\n b ", ["x", "a b"]) == 1.0
    assert exact_match("A b", ["a b"]) == 0.0
    assert exact_match("a b.", ["a b"]) == 0.0
    assert exact_match("", ["a"]) == 0.0


def test_string_match_all_is_a_share() -> None:
    assert string_match_all("It is 12, then FOO.", ["12", "foo"]) == 1.0
    assert string_match_all("foo foo", ["12", "foo", "bar", "34"]) == 0.25
    assert string_match_all("3 412 5", ["12"]) == 1.0  # RULER's measure knows no word borders
    assert string_match_all("a\tb", ["a\nb"]) == 1.0
    assert string_match_all("", ["12"]) == 0.0


def test_string_match_part_needs_one() -> None:
    assert string_match_part("It is 12.", ["34", "12"]) == 1.0
    assert string_match_part("It is 1 2.", ["34", "12"]) == 0.0
    assert string_match_part("in PARIS, France", ["Paris"]) == 1.0


def test_token_f1_by_hand() -> None:
    # "cat sat on mat" against "cat on mat here": 3 common of 4 and 4.
    assert token_f1("The cat sat on the mat.", ["a cat on mat here"]) == pytest.approx(0.75)
    # 2 of 3 said, 2 of 2 wanted: P = 2/3, R = 1.
    assert token_f1("New York City", ["York, New"]) == pytest.approx(0.8)
    assert token_f1("yes yes yes", ["yes"]) == pytest.approx(0.5)  # bags: one of the three
    assert token_f1("dog", ["cat", "the Dog!"]) == 1.0  # the best reference
    assert token_f1("dog", ["cat"]) == 0.0


def test_token_f1_of_nothing() -> None:
    assert token_f1("", ["cat"]) == 0.0
    assert token_f1("the", ["a"]) == 1.0
    assert token_f1("cat", ["the"]) == 0.0


def test_normalisation_in_squads_order() -> None:
    assert normalise("  The state-of-the-art,  An apple; a. THEN ") == "stateoftheart apple then"


def test_leading_steps_stop_at_the_first_mistake() -> None:
    steps = ["red-fox", "old-oak", "blue-bay", "exit"]
    assert leading_steps(" red-fox -> Old-Oak ->blue-bay -> exit.", steps) == 1.0
    assert leading_steps("red-fox -> old-elm -> blue-bay -> exit", steps) == 0.25
    assert leading_steps("red-fox\n\nold-oak\n", steps) == 0.5
    assert leading_steps("so: red-fox -> old-oak", steps) == 0.0
    assert leading_steps("", steps) == 0.0
    assert leading_steps("1: red 50; 2: blue 7; and so on", ["1: red 50", "2: blue 7"]) == 1.0
    assert leading_steps("1: red 50; 2: blue 70", ["1: red 50", "2: blue 7"]) == 0.5


def test_a_sample_says_which_measure_judges_it() -> None:
    def sample(metric: str, also_right: tuple[str, ...] = ()) -> Sample:
        return Sample("t", "?", "one two", 3, ("one", "two"), metric, also_right)

    assert judge(sample("exact_match"), "one two") == 1.0
    assert judge(sample("exact_match"), "two one") == 0.0
    assert judge(sample("exact_match", ("two one",)), "two one") == 1.0
    assert score(sample("exact_match", ("two one",)), "two one") == 0.0
    assert judge(sample("string_match_all"), "two of them") == 0.5
    assert judge(sample("string_match_part"), "two of them") == 0.0
    assert judge(sample("token_f1"), "two one") == 1.0
    assert judge(sample("leading_steps"), "one, three") == 0.5


def test_names() -> None:
    for name, metric in METRICS.items():
        assert metric_called(name) is metric
        assert metric("x", ["x"]) == 1.0
        assert metric("y", ["x"]) == 0.0
    with pytest.raises(ConfigError, match=r"'rouge'.*token_f1"):
        metric_called("rouge")
