import json
import math

import numpy as np
import pytest

from allstep.errors import UsageError
from allstep.plan.noise_scale import NoiseScale, noise_and_signal

DIM = 200
MICRO, GLOBAL = 8, 256


class Quadratic:
    """Per-sample loss |x - a|^2_H / 2 with a ~ N(0, C): gradient noise H C H, signal H x."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.curvature = np.linspace(0.1, 2.0, DIM)
        self.spread = np.linspace(3.0, 0.5, DIM)
        self.point = np.full(DIM, 0.06)

    @property
    def trace(self):
        return float(np.sum((self.curvature * self.spread) ** 2))

    @property
    def squared_gradient(self):
        return float(np.sum((self.curvature * self.point) ** 2))

    def norms(self):
        """Mean squared norm of the micro-batches' gradients, and that of the whole step's."""
        num_micro = GLOBAL // MICRO
        noise = self.rng.normal(size=(num_micro, DIM)) * self.spread / math.sqrt(MICRO)
        gradients = self.curvature * (self.point + noise)
        squared = (gradients**2).sum(axis=1).mean()
        return float(squared), float((gradients.mean(axis=0) ** 2).sum())


def updated(scale, quadratic, num_steps):
    for _ in range(num_steps):
        micro, whole = quadratic.norms()
        scale.update(
            micro_squared_norm=micro,
            global_squared_norm=whole,
            micro_batch=MICRO,
            global_batch=GLOBAL,
        )
    return scale


@pytest.mark.parametrize("decay", [None, 0.99])
def test_noise_scale_of_a_quadratic_equals_its_closed_form(decay):
    quadratic = Quadratic()
    expected = quadratic.trace / quadratic.squared_gradient
    found = updated(NoiseScale(decay), quadratic, 500).value
    assert found == pytest.approx(expected, rel=0.1)


def test_noise_scale_from_the_mean_of_ratios_is_biased():
    """What averaging numerator and denominator apart is for."""
    quadratic = Quadratic()
    expected = quadratic.trace / quadratic.squared_gradient
    ratios = []
    for _ in range(500):
        micro, whole = quadratic.norms()
        noise, signal = noise_and_signal(
            micro_squared_norm=micro,
            global_squared_norm=whole,
            micro_batch=MICRO,
            global_batch=GLOBAL,
        )
        ratios.append(noise / signal)
    assert abs(np.mean(ratios) / expected - 1) > 0.1


def test_noise_and_signal_are_unbiased():
    quadratic = Quadratic(seed=1)
    terms = [
        noise_and_signal(
            micro_squared_norm=micro,
            global_squared_norm=whole,
            micro_batch=MICRO,
            global_batch=GLOBAL,
        )
        for micro, whole in (quadratic.norms() for _ in range(1000))
    ]
    noise, signal = np.mean(terms, axis=0)
    assert noise == pytest.approx(quadratic.trace, rel=0.02)
    assert signal == pytest.approx(quadratic.squared_gradient, rel=0.1)


def test_noise_scale_from_exact_expectations_is_exact():
    scale = NoiseScale()
    for signal in (1.0, 3.0):
        scale.update(
            micro_squared_norm=signal + 500 / 16,
            global_squared_norm=signal + 500 / 128,
            micro_batch=16,
            global_batch=128,
        )
    assert scale.value == pytest.approx(500 / 2)


def test_noise_scale_is_never_negative():
    """Where by chance the micro-batch's gradient is the shorter one."""
    scale = NoiseScale()
    scale.update(micro_squared_norm=1.0, global_squared_norm=2.0, micro_batch=16, global_batch=128)
    assert scale.value == 0.0


def test_noise_scale_with_decay_follows_a_change():
    def grown(scale):
        for noise in [100.0] * 100 + [1000.0] * 100:
            scale.update(
                micro_squared_norm=1 + noise / 8,
                global_squared_norm=1 + noise / 64,
                micro_batch=8,
                global_batch=64,
            )
        return scale.value

    assert grown(NoiseScale(0.9)) == pytest.approx(1000, rel=0.01)
    assert grown(NoiseScale()) == pytest.approx(550, rel=0.01)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_noise_scale_resumes_bit_for_bit(decay):
    straight = updated(NoiseScale(decay), Quadratic(), 30)
    quadratic = Quadratic()
    first = updated(NoiseScale(decay), quadratic, 10)
    second = NoiseScale(decay)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.num_updates == 10
    assert updated(second, quadratic, 20).value == straight.value


def scale_of(value):
    scale = NoiseScale()
    scale.update(
        micro_squared_norm=1 + value / 16,
        global_squared_norm=1 + value / 64,
        micro_batch=16,
        global_batch=64,
    )
    return scale


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1987.0, "useful up to about B = 2,000, that is 62 workers of 32"),
        (123456.0, "useful up to about B = 120,000, that is 3,750 workers of 32"),
        (40.0, "useful up to about B = 40: one worker of 32 is enough"),
        (0.0, "no noise was seen so far: a larger batch would save no steps"),
    ],
)
def test_noise_scale_summary_counts_workers(value, text):
    assert scale_of(value).summary(32) == text


def test_noise_scale_summary_says_what_is_not_known():
    assert NoiseScale().value is None
    assert NoiseScale().summary(32) == "the noise scale has not been measured yet"
    noisy = NoiseScale()
    noisy.update(micro_squared_norm=8.0, global_squared_norm=1.0, micro_batch=1, global_batch=8)
    assert noisy.value == math.inf
    assert noisy.summary(32).startswith("the gradient is all noise so far")


GOOD = {
    "micro_squared_norm": 2.0,
    "global_squared_norm": 1.0,
    "micro_batch": 8,
    "global_batch": 64,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_squared_norm": -1.0}, r"`micro_squared_norm` \(=-1.0\) must be 0 or more"),
        ({"global_squared_norm": math.nan}, r"`global_squared_norm` \(=nan\).*skip such a step"),
        ({"micro_batch": 0}, r"`micro_batch` \(=0\) must be above 0"),
        ({"micro_batch": 64}, r"`micro_batch` \(=64\) must be below `global_batch` \(=64\)"),
    ],
)
def test_noise_scale_refuses_wrong_norms(change, message):
    scale = NoiseScale()
    with pytest.raises(UsageError, match=message):
        scale.update(**{**GOOD, **change})
    assert scale.num_updates == 0


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_noise_scale_refuses_a_wrong_decay(decay):
    with pytest.raises(UsageError, match=r"`decay` \(=.*\) must be between 0 and 1"):
        NoiseScale(decay)


def test_noise_scale_refuses_another_decay_at_resume():
    with pytest.raises(
        UsageError, match=r"`decay` \(=0.9\) differs from the checkpoint's \(None\)"
    ):
        NoiseScale(0.9).load_state_dict(NoiseScale().state_dict())
