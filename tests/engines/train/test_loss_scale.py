from flowrl.engines.train.loss_scale import LossScale


def test_an_overflow_halves_the_factor_and_starts_the_count_anew():
    assert LossScale(1024.0, good_steps=7).after(overflowed=True) == LossScale(512.0, good_steps=0)


def test_the_factor_never_falls_below_one():
    assert LossScale(1.0).after(overflowed=True).factor == 1.0


def test_two_thousand_good_steps_double_the_factor():
    scale = LossScale(8.0)
    for _ in range(1999):
        scale = scale.after(overflowed=False)
    assert scale == LossScale(8.0, good_steps=1999)
    assert scale.after(overflowed=False) == LossScale(16.0, good_steps=0)
