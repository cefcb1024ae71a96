"""Non-negative least squares on relative error."""

import numpy as np
import pytest

from harts.work_models.fit import fitted, relative_errors


def test_exact_times_give_their_coefficients():
    rng = np.random.default_rng(1)
    counts = rng.uniform(0, [1, 1e4, 1e3, 1e8, 50, 6], (15, 6))
    truth = np.array([2e6, 900.0, 0.0, 0.02, 0.0, 4e5])
    assert np.allclose(fitted(counts, counts @ truth), truth, rtol=1e-6, atol=1e-3)
    assert relative_errors(counts, counts @ truth, truth).max() < 1e-12


@pytest.mark.parametrize("seed", range(40))
def test_solution_meets_the_conditions_of_the_minimum(seed):
    rng = np.random.default_rng(seed)
    counts = rng.uniform(0, 1, (12, 5))
    measured = np.abs(counts @ rng.normal(size=5)) + 0.1
    found = fitted(counts, measured)
    relative = counts / measured[:, None]
    slope = relative.T @ (relative @ found - 1)
    assert (found >= 0).all()
    assert (slope >= -1e-9).all()  # no coefficient wants to grow
    assert abs(slope[found > 0]).max() < 1e-9  # and those above 0 do not want to fall


def test_term_that_never_occurs_costs_nothing():
    counts = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert fitted(counts, np.array([3.0, 6.0])).tolist() == pytest.approx([3.0, 0.0])
