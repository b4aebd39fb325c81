"""The paired t-test over seeds: differences of methods to a baseline with 95% t-intervals, and Student's t.

Pairing removes the variation that all methods share in a seed: split, initial model, cohorts and batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import unknown
from .labels import find_label
from .run_files import Row, measured

SMALL = 0.005
"""Half a point of accuracy: an interval that contains 0 and lies within this distance of it: not real."""

ENOUGH = 3
"""The least number of seeds that decide."""

MOST = 1000
"""The largest number of seeds that `Gap.more` recommends."""

YES = "yes"
NO = "no"
UNDECIDED = "undecided"
UNKNOWN = "unknown: 1 seed"
DIVERGED = "undecided: diverged"
STOPPED = "undecided: stopped"
OTHER_DATA = "other data"
T_975 = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
    2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
    2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272,
)  # fmt: skip
"""The 97.5% quantile of Student's t with 1 to 30 degrees of freedom."""

METRICS = {"test_accuracy": ("mean_last5_accuracy", "last_accuracy"), "test_loss": ("last_test_loss",)}


@dataclass(frozen=True)
class Gap:
    """A method minus the baseline in one metric.

    Args:
        values: one difference per seed that both have; a run that diverged has none.
        other: whether a pair was trained on different data, so that the difference does not compare methods.
        diverged: the number of runs of either that diverged; the remaining seeds decide nothing.
        at_goal: the number of runs of either that were stopped at a score, so that they end with that score.
        low, high: 95% t-interval of the mean; infinite with fewer than two seeds.
    """

    method: str
    metric: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float | None
    low: float
    high: float
    diverged: int = 0
    other: bool = False
    at_goal: int = 0

    @property
    def real(self) -> str:
        """`yes` if the interval excludes 0, `no` if it lies within half a point of 0, else why it is undecided.

        For losses, only an interval of 0 alone gives `no`. Two seeds decide nothing, since they may be alike by chance,
        and nor do equal differences in all seeds, which come from a small test set; unless all of them are 0: `no`.
        """
        if self.other:
            return OTHER_DATA
        if self.diverged:
            return DIVERGED
        if self.at_goal:
            return STOPPED
        if len(self.values) < 2:
            return UNKNOWN if self.values else "no seed in common"
        if (len(self.values) < ENOUGH or self.high - self.low <= 1e-9) and max(map(abs, self.values)) > 1e-9:
            return UNDECIDED
        if self.low > 0 or self.high < 0:
            return YES
        small = SMALL if "accuracy" in self.metric else 0.0
        return NO if max(-self.low, self.high) <= small else UNDECIDED

    @property
    def answer(self) -> str:
        """`real`, for `yes` whether the method is better or worse, and whether seeds are too few to decide."""
        if self.real == UNDECIDED and len(self.values) < ENOUGH:
            return f"{UNDECIDED}: {len(self.values)} seeds"
        if self.real != YES:
            return self.real
        better = (self.low > 0) == ("accuracy" in self.metric)
        return "yes, better" if better else "yes, worse"

    @property
    def more(self) -> int | None:
        """The number of further seeds that would decide, if they vary like those there are.

        None if the difference is not undecided, or `MOST` seeds would not decide it.

        Example:
            >>> Gap("a", "last_accuracy", (0, 1), (0.01, 0.03), 0.02, *interval([0.01, 0.03])).more
            3
        """
        if self.real != UNDECIDED or self.mean is None:
            return None
        n, deviation = len(self.values), statistics.stdev(self.values)
        small = SMALL if "accuracy" in self.metric else 0.0
        if self.high - self.low <= 1e-9:  # equal differences in more seeds would not decide either
            return None
        for total in range(n + 1, MOST + 1):
            half = t_975(total - 1) * deviation / math.sqrt(total)
            if half < abs(self.mean) or half + abs(self.mean) <= small:
                return total - n
        return None


def distinguished(differences: Sequence[float]) -> bool:
    """Return whether paired differences of scores distinguish two methods, by the rule of `Gap.real`.

    Example:
        >>> distinguished([0.1, 0.12]), distinguished([0.1, 0.12, 0.11]), distinguished([0.1, 0.1, 0.1])
        (False, True, False)
    """
    low, high = interval(differences)
    return len(differences) >= ENOUGH and high - low > 1e-9 and not low <= 0 <= high


def gaps(rows: Sequence[Row], baseline: str = "") -> list[Gap]:
    """Compare every method with the baseline (the first row unless named) in every metric."""
    against = find_row(rows, baseline)
    metrics = METRICS[measured(rows)]
    return [_gap(row, against, metric) for row in rows if row is not against for metric in metrics]


def find_row(rows: Sequence[Row], label: str) -> Row:
    """Return the row that a label means (`find_label`), the first for ""."""
    labels = [row.label for row in rows]
    meant = find_label(label, labels) if label else labels[0]
    if meant is None:
        raise unknown("--baseline", label, labels)
    return rows[labels.index(meant)]


def _gap(row: Row, against: Row, metric: str) -> Gap:
    ours, theirs = row.by_seed(metric), against.by_seed(metric)
    seeds = tuple(sorted(set(ours) & set(theirs)))
    values = tuple(ours[seed] - theirs[seed] for seed in seeds)
    low, high = interval(values)
    mean = statistics.fmean(values) if values else None
    data = {(run.summary["seed"], run.summary.get("data_fingerprint")) for r in (row, against) for run in r.runs}
    other = any(len({fingerprint for seed, fingerprint in data if seed == s and fingerprint}) > 1 for s in seeds)
    diverged, at_goal = row.diverged + against.diverged, row.at_goal + against.at_goal
    return Gap(row.label, metric, seeds, values, mean, low, high, diverged, other, at_goal)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% t-interval of the mean; infinite for fewer than two values.

    Example:
        >>> "%.3f %.3f" % interval([1.0, 2.0, 3.0])
        '-0.484 4.484'
    """
    n = len(values)
    if n < 2:
        return -math.inf, math.inf
    mean, half = statistics.fmean(values), t_975(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def t_975(df: int) -> float:
    """Return the 97.5% quantile of Student's t: a table up to 30, then the Cornish-Fisher expansion (error 1e-5)."""
    if df <= len(T_975):
        return T_975[df - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / df + second / df**2 + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)


def t_p(t: float, df: int) -> float:
    """Return the two-sided p of Student's t with `df` degrees of freedom (Abramowitz and Stegun, 26.7.3-4).

    Example:
        >>> round(t_p(4.302653, 2), 6), round(t_p(-2.262157, 9), 6)
        (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(df))
    cos, sin = math.cos(angle), math.sin(angle)
    odd = df % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, df, 2):
        total += sin * term
        term *= cos * cos * k / (k + 1)
    inside = (angle + total) * 2 / math.pi if odd else total
    return max(0.0, 1 - inside)
