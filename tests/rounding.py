"""The rule for every bound that a processor's rounding can reach: how far two right computations may differ.

Each rounding moves a result by at most eps / 2 of its size, so `steps` of them in sequence move it by less than
`steps * eps` of the largest term (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1).
The largest number compared stands for that term; log-probs near 0 come from logits of 1 and more. Which roundings
happen differs between processors, libraries, threads and shapes; their number does not.

A fault is larger: a scale, bias, mask or position that is left out moves a log-prob of the tests' models, drawn with a
wide spread for this, by more than 1e-3. Numbers of Python and of float64 are compared by pytest.approx, or to 1e-9.
"""

from __future__ import annotations

import json
import os

import numpy as np
import torch

FORMULA = 8  # steps of a loss, a ratio or a mean of few terms: 1e-6 of it in float32
NETWORK = 80
"""steps through the tests' models, two layers with sums of up to 64 terms, and a log-softmax: 1e-5 in float32"""
GRADIENT = 240  # steps there and back: a backward pass has twice the sums of a forward pass; 3e-5 in float32
FEW_BITS = 800  # steps through weights in 4 bits, which some CPUs multiply in blocks of their own: 1e-4 in float32

NO_KL = 1e-8
"""A KL of equal weights is less: half the square of a log-prob's rounding, 5e-9 where log-probs are about -10."""


def assert_rounded(
    actual, expected, steps: int = NETWORK, dtype: torch.dtype = torch.float32, least: float = 1.0, about: object = ""
) -> None:
    """Assert that `actual` is `expected` but for `steps` roundings of `dtype`.

    Both are numbers, or arrays of one shape. The bound is `steps * eps` of the largest of `expected`, and of `least`.
    """
    actual, expected = _numbers(actual), _numbers(expected)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape} {about}"
    bound = steps * torch.finfo(dtype).eps * max(np.abs(expected).max(initial=0.0), least)
    difference = np.abs(actual - expected).max(initial=0.0)
    if bound and (path := os.environ.get("ROUNDING_LOG")):  # tests/processors.py reads it
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with open(path, "a") as log:
            log.write(json.dumps([difference / bound, difference, test]) + "\n")
    assert difference <= bound, f"{difference:.3g} is more than {steps} roundings, {bound:.3g} {about}"


def _numbers(values) -> np.ndarray:
    return values.detach().cpu().double().numpy() if torch.is_tensor(values) else np.asarray(values, np.float64)
