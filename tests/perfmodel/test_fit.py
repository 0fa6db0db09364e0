"""Fits, learnt costs and profiles."""

import random
from pathlib import Path

import numpy as np
import pytest

from pdserve.base.errors import ConfigError
from pdserve.perfmodel.curve import Curve, DecodePiece, Step, StepCosts, attention_work
from pdserve.perfmodel.model import ENOUGH_STEPS, LATELY_S, Fit, LearntCosts, LearntLinks, nonnegative_minimum
from pdserve.perfmodel.profile import read_profile

TRUTH = Curve(0.02, 1e-4, 7e-9)
WRONG = Curve(0.1, 1e-5, 0.0)
PROFILE = Path(__file__).parents[2] / "pdserve/perfmodel/profiles/opt-13b-a100.yaml"


def noisy(rng: random.Random, seconds: float) -> float:
    return seconds * rng.uniform(0.95, 1.05)


def taught(steps: int, seed: int = 0) -> Fit:
    rng, fit = random.Random(seed), Fit(WRONG, ((64, 64**2), (4096, 4096**2)))
    for _ in range(steps):
        tokens = rng.randrange(16, 4096)
        work = attention_work(tokens, rng.choice([0, 2048]))
        fit.observe(tokens, work, noisy(rng, TRUTH.seconds(tokens, work)))
    return fit


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_start_is_forgotten_within_some_hundred_steps(seed: int) -> None:
    curve = taught(400, seed).curve
    for tokens in (32, 300, 3000):
        expected_s = TRUTH.seconds(tokens, tokens**2)
        assert curve.seconds(tokens, tokens**2) == pytest.approx(expected_s, rel=0.08)


@pytest.mark.parametrize("factor", [0.02, 1.0, 50.0])
def test_a_start_of_another_device_is_right_after_a_few_steps(factor: float) -> None:
    slower = Curve(factor * TRUTH.step_s, factor * TRUTH.each_s, factor * TRUTH.context_s)
    rng, fit = random.Random(1), Fit(TRUTH, ((64, 64**2), (512, 512**2), (4096, 4096**2)))
    for tokens in (47, 900, 300):
        fit.observe(tokens, tokens**2, noisy(rng, slower.seconds(tokens, tokens**2)))
    for tokens in (32, 300, 3000):
        assert fit.curve.seconds(tokens, tokens**2) == pytest.approx(slower.seconds(tokens, tokens**2), rel=0.15)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    fit = taught(400)
    for _ in range(600):
        fit.observe(500, 500**2, 2 * TRUTH.seconds(500, 500**2))
    assert fit.curve.seconds(500, 500**2) == pytest.approx(2 * TRUTH.seconds(500, 500**2), rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_ever_negative(seed: int) -> None:
    rng, fit = random.Random(seed), Fit(WRONG, ((64, 64**2),))
    for _ in range(200):
        fit.observe(rng.randrange(1, 100), rng.randrange(1, 100), rng.uniform(0.001, 1.0))
        assert min(fit.curve.step_s, fit.curve.each_s, fit.curve.context_s) >= 0


def test_steps_that_are_all_alike_leave_a_finite_curve_that_predicts_them() -> None:
    fit = Fit(WRONG, ((64, 64**2),))
    for _ in range(3000):
        fit.observe(100, 100, 0.05)
    assert fit.curve.seconds(100, 100) == pytest.approx(0.05, rel=0.01)


def test_one_hiccup_does_not_move_it_much() -> None:
    fit = taught(400)
    before_s = fit.curve.seconds(1000, 1000**2)
    fit.observe(1000, 1000**2, 50 * before_s)
    for _ in range(16):
        fit.observe(1000, 1000**2, before_s)
    assert fit.curve.seconds(1000, 1000**2) == pytest.approx(before_s, rel=0.1)


def test_chunks_of_a_prompt_add_up_to_its_whole() -> None:
    assert attention_work(300, 0) + attention_work(200, 300) + attention_work(12, 500) == attention_work(512, 0)


def test_a_step_that_does_both_reads_the_weights_once() -> None:
    costs = StepCosts(Curve(0.02, 1e-4, 0.0), (DecodePiece(95, Curve(0.03, 1e-3, 0.0)), DecodePiece(None, TRUTH)))
    assert costs.seconds(Step(prefill_tokens=100)) == pytest.approx(0.03)
    assert costs.seconds(Step(sequences=10)) == pytest.approx(0.04)
    assert costs.seconds(Step(prefill_tokens=100, sequences=10)) == pytest.approx(0.05)
    assert costs.decode_curve(96) is TRUTH


def test_prefill_is_learnt_from_steps_that_also_decode() -> None:
    rng, costs = random.Random(1), StepCosts(TRUTH, (DecodePiece(None, Curve(0.01, 1e-4, 1e-7)),))
    learnt = LearntCosts()
    for _ in range(400):
        decoding = Step(sequences=rng.randrange(1, 20), kv_tokens=rng.randrange(1, 20_000))
        learnt.observe(decoding, costs.seconds(decoding), 0.0)
        tokens = rng.randrange(100, 2000)
        both = Step(tokens, tokens**2, decoding.sequences, decoding.kv_tokens)
        learnt.observe(both, costs.seconds(both), 0.0)
    assert learnt.prefill_s(1000, 1000**2, 4096) == pytest.approx(TRUTH.seconds(1000, 1000**2), rel=0.1)
    assert learnt.decode_s(8, 8000) == pytest.approx(costs.seconds(Step(sequences=8, kv_tokens=8000)), rel=0.05)


def elbow_s(sequences: int, kv_tokens: int) -> float:
    """A decode step that is bound by reading weights up to six sequences, and by arithmetic beyond."""
    return 0.03 + 1e-6 * kv_tokens + 0.0035 * max(0, sequences - 6)


def teach_batches(learnt: LearntCosts, sizes: range, num_steps: int, rng: random.Random) -> None:
    for _ in range(num_steps):
        size = rng.choice(sizes)
        kv_tokens = size * rng.randrange(50, 300)
        learnt.observe(Step(sequences=size, kv_tokens=kv_tokens), noisy(rng, elbow_s(size, kv_tokens)), 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_first_answer_of_few_tokens_says_little_of_long_contexts(seed: int) -> None:
    """A machine with other work takes up to twice as long for a step; seen over 23 tokens, that is no slope."""
    rng, learnt = random.Random(seed), LearntCosts(StepCosts(TRUTH, (DecodePiece(None, Curve(0.02, 1e-3, 1e-7)),)))
    for _ in range(2):
        for kv_tokens in range(9, 32):
            learnt.observe(Step(sequences=1, kv_tokens=kv_tokens), rng.uniform(0.025, 0.05), 0.0)
            assert learnt.decode_s(1, 460) < 0.1


def test_a_mean_batch_costs_what_batches_around_it_cost_on_average() -> None:
    rng, learnt = random.Random(5), LearntCosts()
    teach_batches(learnt, range(1, 8), 2000, rng)
    for low in (1, 3):
        costs_s = [learnt.decode_s(size, 100 * size) for size in (low, low + 1)]
        assert learnt.decode_s(low + 0.25, 100 * (low + 0.25)) == pytest.approx(0.75 * costs_s[0] + 0.25 * costs_s[1])


def test_a_token_takes_a_steps_time_over_the_tokens_that_it_brings() -> None:
    costs = LearntCosts()
    for number in range(1000):
        size = 4 + number % 4
        step = Step(sequences=4 * size, kv_tokens=400 * size, guesses=3 * size, kept_guesses=size)
        costs.observe(step, 0.010 + 0.001 * 4 * size, float(number))
    assert costs.tokens_a_step == pytest.approx(2.0, rel=1e-3)
    assert costs.token_s(6, 600) == pytest.approx((0.010 + 0.001 * 24) / 2, rel=0.02)


def test_a_token_takes_a_step_where_nothing_is_guessed() -> None:
    costs = LearntCosts()
    for number in range(50):
        costs.observe(Step(sequences=2 + number % 2, kv_tokens=300), 0.02, float(number))
    assert costs.token_s(3, 300) == costs.decode_s(3, 300)


def test_what_large_batches_cost_is_known_after_a_long_time_of_small_ones() -> None:
    rng, learnt = random.Random(3), LearntCosts()
    teach_batches(learnt, range(8, 20), 200, rng)
    teach_batches(learnt, range(1, 5), 3000, rng)
    for size in (1, 4, 9, 12, 17):
        assert learnt.decode_s(size, 150 * size) == pytest.approx(elbow_s(size, 150 * size), rel=0.06)


def test_a_size_never_seen_is_taken_to_go_on_as_the_nearest_does() -> None:
    rng, learnt = random.Random(4), LearntCosts()
    teach_batches(learnt, range(8, 16), 400, rng)
    assert learnt.decode_s(20, 3000) == pytest.approx(elbow_s(20, 3000), rel=0.1)


def test_requests_are_not_refused_on_the_word_of_a_new_or_stale_model() -> None:
    learnt = LearntCosts()
    for i in range(ENOUGH_STEPS):
        assert not learnt.knows_decode(i * 0.1)
        learnt.observe(Step(sequences=1, kv_tokens=10), 0.02 + 0.05 * (i % 2), i * 0.1)
    assert learnt.knows_decode(4.0)
    assert not learnt.knows_decode(4.0 + LATELY_S)


def test_a_profile_that_proves_right_is_believed_sooner() -> None:
    learnt = LearntCosts(StepCosts(TRUTH, (DecodePiece(None, TRUTH),)))
    for _ in range(8):
        assert not learnt.knows_prefill(0.0)
        learnt.observe(Step(100, 10_000), TRUTH.seconds(100, 10_000), 0.0)
    assert learnt.knows_prefill(0.0)


def test_bandwidth_is_that_of_the_pair() -> None:
    links = LearntLinks(1e9, 0.001)
    links.observe(("p0", "d0"), 10_000_000, 0.001)
    links.observe(("p0", "d1"), 100, 1.0)
    assert links.bytes_per_s(("p0", "d0")) == 1e10
    assert links.bytes_per_s(("p0", "d1")) == 1e9, "small hand-offs tell nothing of it"
    links.forget("d0")
    assert links.bytes_per_s(("p0", "d0")) == 1e9


def test_what_a_pair_measured_itself_counts_until_hand_offs_tell() -> None:
    links = LearntLinks(1e9)
    links.begin(("p0", "d0"), 4e9)
    assert links.bytes_per_s(("p0", "d0")) == 4e9
    links.observe(("p0", "d1"), 10_000_000, 0.01)
    links.begin(("p0", "d1"), 9e9)
    assert links.bytes_per_s(("p0", "d1")) == 1e9


def test_the_shipped_profile_is_distserves() -> None:
    profile = read_profile(PROFILE)
    costs = profile.configuration(1).costs()
    assert costs.seconds(Step(prefill_tokens=1000, prefill_work=1000**2)) == pytest.approx(0.1271, rel=1e-3)
    assert costs.seconds(Step(sequences=32, kv_tokens=32_000)) == pytest.approx(0.04123, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("kv_tokens: 66144", "kv_tokens: many", "line 13: configurations.0.kv_tokens"),
        ("kv_bytes_per_token: 819200", "", "kv_bytes_per_token: is required"),
        ("token_s: 0.0001019120", "token_s: -1", "configurations.0.prefill.token_s"),
        ("link:", "links:", "links: unknown key, did you mean link?"),
        ("tp: 1", "tp: [", "line"),
    ],
)
def test_a_broken_profile_names_file_line_and_field(tmp_path: Path, old: str, new: str, told: str) -> None:
    text = PROFILE.read_text()
    assert old in text
    broken = tmp_path / "broken.yaml"
    broken.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_profile(broken)
    assert "broken.yaml" in str(caught.value)
    assert told in str(caught.value)


def test_an_unmeasured_degree_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"tp: 3 .* \[1, 2, 4\]"):
        read_profile(PROFILE).configuration(3)


def test_it_predicts_the_mean_with_its_hiccups() -> None:
    rng, fit = random.Random(5), Fit(TRUTH, ((64.0, 64.0**2),))
    for _ in range(4000):
        tokens = rng.randrange(16, 4096)
        fit.observe(tokens, tokens**2, TRUTH.seconds(tokens, tokens**2) * (4.0 if rng.random() < 0.1 else 1.0))
    assert fit.curve.seconds(1000, 1000**2) == pytest.approx(1.3 * TRUTH.seconds(1000, 1000**2), rel=0.15)


@pytest.mark.parametrize("seed", range(50))
def test_no_step_towards_a_permitted_point_improves_on_the_minimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, sums = rng.normal(size=(6, 3)), rng.normal(size=3)
    products = rows.T @ rows + 1e-4 * np.eye(3)
    found = nonnegative_minimum(products, sums)
    slope = products @ found - sums
    assert (found >= 0).all()
    assert (slope >= -1e-9).all()  # to raise a coefficient gains nothing,
    assert slope[found > 0] == pytest.approx(0, abs=1e-9)  # and to lower one neither
