"""Rings of a full mesh on which any two ranks are at each distance equally often.

What leaves every rank of every ring for the rank d places before it, as results of TokenRing do, then loads all links
equally, for each d. Rings that use each link once balance only d = 1 and d = n - 1.

**Prime powers.** Let q be a prime power, and take the images of a ring (x_0, ..., x_{q-1}) of the elements of the field
of q elements under all maps x -> ax + b with a not 0. For two ranks u, v and a distance d, exactly one such map takes
x_i to u and x_{i+d} to v, for each i. So there are q of them, whatever u, v and d. The ring 0, 1, ..., q - 1 (elements
as numbers to base p, digit by digit) is its own image under adding q/p, so q (q-1) / p images are different: those of
a prime are the q - 1 multiples of one ring; of 8 they are 28, of 4 all 6.

**Even numbers of ranks** need more than n - 1 rings. Number the ranks by their place on one ring, let f(x) be the place
of rank x on another. If no two ranks are at the same distance on both, f(x) - x is different for all x, so modulo n
the sum of f(x) - x is that of all numbers, n (n-1) / 2, which is not 0 for even n; but the sums of f(x) and of x are
equal. So any two rings put two ranks at the same distance, and the link between them carries twice.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from tasp_lab.core.arrays import IntArray


def balanced_rings(n: int) -> IntArray | None:
    """Rings of n ranks, each from rank 0 on, an int array (rings, n); None unless n is a prime power.

    >>> balanced_rings(5).tolist()
    [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2], [0, 4, 3, 2, 1]]
    >>> [0 if rings is None else len(rings) for rings in map(balanced_rings, (2, 4, 6, 8, 9, 16))]
    [1, 6, 0, 28, 24, 120]
    """
    prime = next((p for p in range(2, n + 1) if n % p == 0), 0)
    degree = next((k for k in range(1, n.bit_length() + 1) if prime**k == n), 0)
    if not degree:
        return None
    weights = prime ** np.arange(degree)
    digits = np.arange(n)[:, None] // weights % prime
    sums: IntArray = (digits[:, None] + digits) % prime @ weights
    images = sums[:, _multiples(digits, prime, weights)].reshape(-1, n)
    start = (images == 0).argmax(axis=1)
    rings: IntArray = np.unique(images[np.arange(len(images))[:, None], (start[:, None] + np.arange(n)) % n], axis=0)
    return rings


def _multiples(digits: IntArray, prime: int, weights: IntArray) -> IntArray:
    """All multiples of the elements of a field but those by 0, an array (n - 1, n)."""
    n, degree = digits.shape
    for reduced in product(range(prime), repeat=degree):
        # times x, where x to the power of the degree is `reduced`: digits move up, the highest one is reduced
        raised = np.pad(digits[:, :-1], ((0, 0), (1, 0))) + digits[:, -1:] * np.array(reduced)
        times = raised % prime @ weights
        found = [np.arange(n)]
        while len(found) < n and (times[found[-1]][1] != 1):
            found.append(times[found[-1]])
        if len(found) == n - 1 and np.array_equal(times[found[-1]], found[0]):
            return np.stack(found)
    raise AssertionError(f"a field of {n} elements has a generator")
