"""Groups of WAA's decode pool that hold a query, where there are few queries a group.

Symbols: n queries in G groups, rho = n / G, c = ceil(rho), the even share up to which the rule
(xrunner.rules.waa) fills a group when its turn comes. Who arrives joins a group that has less than
c, though others may be empty: groups without a query take no step, and the head passes over them
in no time. So with 65 queries in 48 groups some 40 take a step in an iteration, not 48.

In the mean field of many groups let p_j be the share of those that hold j queries. Queries leave
them at rates j. Who arrives finds the head waiting for a group that is not empty, and joins that
one if it has room, else the next in turn that has. With r = p_c that balances where p_j = r s^j /
j! / Z and p_0 = 1 / Z, Z = 1 + r (E_c - 1) = s^c / c!, E_k = sum over j <= k of s^j / j!. So of
each s

    r = (s^c / c! - 1) / (E_c - 1),   rho = r s E_(c - 1) / Z,   1 - p_0 = 1 - c! / s^c.

By the rule itself on 8 to 48 groups the share is within 3 %. Where rho just exceeds a whole number
it leaps down, from 1 to 0.65 at one query a group. From four queries a group on there is hardly an
empty one, and of few groups mean fields say little: then all are taken to hold some."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.envelope import rising_minorant

MANY_GROUPS = 8  # from so many on
FULL = 4.0  # queries a group from which on all groups hold some
LEAST_SHARE = 0.57  # of groups that hold a query, from so many queries a group on, or of more
_NODES = 128  # of a query a group
SIZES: FloatArray = np.arange(1, int(FULL) * _NODES + 1) / _NODES  # queries a group
_NEAR = 1 / MANY_GROUPS  # of a whole number: both even shares may be


def busy_groups(decoding: FloatArray, groups: FloatArray) -> FloatArray:
    """So many of the groups hold a query [configs], where `decoding` queries are in them; never
    fewer than one. Within half a query of a whole number a group the even share is now the one, now
    the other."""
    each = decoding / groups
    busy: FloatArray = np.minimum(groups, np.maximum(decoding, 1.0))
    rows = np.flatnonzero((groups >= MANY_GROUPS) & (each > 1 - _NEAR) & (each < FULL))
    if len(rows):
        own, number = each[rows], groups[rows]
        whole = np.rint(own)
        above = np.clip((own - whole) * number + 0.5, 0.0, 1.0)
        share = (1 - above) * _busy(own, whole) + above * _busy(own, whole + 1)
        busy[rows] = share * number
    return busy


def least_busy(decoding: FloatArray, fewest: IntArray, highest: IntArray) -> FloatArray:
    """No fewer groups hold a query [..., boxes] where as many or more decode, of any number of
    groups from the fewest to the highest; it grows with the queries, and falls in relation to
    them."""
    each = decoding / fewest
    busy: FloatArray = np.minimum(fewest, np.maximum(decoding, 1.0))
    may_be = (highest >= MANY_GROUPS) & (each < FULL)
    if may_be.any():
        share = np.interp(each, SIZES, least_shares())
        busy = np.where(may_be, np.maximum(fewest * share, 1.0), busy)
    return busy


@cache
def least_shares() -> FloatArray:
    """[SIZES] no smaller share of groups holds a query, with so many a group or more."""
    share = np.minimum(*(_busy(SIZES, np.ceil(SIZES + near)) for near in (-_NEAR, _NEAR)))
    least = rising_minorant(SIZES, share)
    least.flags.writeable = False
    return least


def _busy(each: FloatArray, even: FloatArray) -> FloatArray:
    """Share of groups that hold a query, of `each` a group in the mean and `even` at most."""
    share = np.minimum(each, 1.0)
    for most in range(2, int(FULL) + 1):
        rows = np.flatnonzero(even == most)
        if len(rows):
            share[rows] = np.interp(each[rows], *_of_even_share(most))
    return share


@cache
def _of_even_share(most: int) -> tuple[FloatArray, FloatArray]:
    """(queries a group, share of groups that hold one) where a group has so many at most."""
    power = np.append(np.linspace(0.0, 1.0, 400, endpoint=False)[1:], 1 - 1e-9)  # 1 - p_0
    s = (math.factorial(most) / (1 - power)) ** (1 / most)
    terms = np.stack([s**j / math.factorial(j) for j in range(most + 1)])
    r = (terms[-1] - 1) / (terms.sum(axis=0) - 1)
    return r * s * terms[:-1].sum(axis=0) / terms[-1], power
