"""Rates, assumptions and admissible K of FedSpeed and the methods its paper compares with, as published."""

from __future__ import annotations

from typing import NamedTuple


class PublishedRate(NamedTuple):
    """One row: on (1/T) sum E||grad F||^2, non-convex F, in T communication rounds of K steps; S of m clients."""

    method: str
    rate: str
    assumptions: str
    K: str
    note: str
    source: str


RATES = (
    PublishedRate(
        "FedSpeed",
        "O(1/T)",
        "A1 smooth, A2 bounded noise, A3 bounded heterogeneity; full participation",
        "K >= lam/eta, K = O(T)",
        "as printed not true without a limit on lam L (`fedspeed theory counterexample`); with lam L below a constant "
        "it is, without A3 for rho = 0 (form `tracking`)",
        "Sun et al., ICLR 2023, Theorem 4.4 and its corollary",
    ),
    PublishedRate(
        "FedAvg",
        "O(1/sqrt(SKT) + K/T)",
        "A1, A2, A3",
        "K at most of order T (T/m)",
        "the rate as the FedSpeed paper quotes it; the source has O(1/sqrt(mKT) + 1/T) under full and "
        "O(sqrt(K/(ST)) + 1/T) under partial participation",
        "Yang, Fang, Liu, ICLR 2021",
    ),
    PublishedRate(
        "SCAFFOLD",
        "O(1/sqrt(SKT))",
        "A1, A2; no A3",
        "constant",
        "dominant term; needs client state",
        "Karimireddy et al., ICML 2020",
    ),
    PublishedRate(
        "FedAdam",
        "O(1/sqrt(SKT))",
        "A1, A2 a coordinate, A3 a coordinate, bounded gradients",
        "constant",
        "dominant term",
        "Reddi et al., ICLR 2021",
    ),
    PublishedRate(
        "VRL-SGD",
        "O(1/sqrt(mKT))",
        "A1, A2; no A3; full participation",
        "K = O(sqrt(T_it)/m^(3/2))",
        "the FedSpeed paper compares this O(sqrt(T)) with its O(T), but here T_it = KT counts iterations: in rounds it "
        "is K = O(T/m^3), of the same order in T",
        "Liang et al., arXiv 1912.12844, 2019",
    ),
)
