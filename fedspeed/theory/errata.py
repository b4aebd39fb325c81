"""The errata of the published analysis, by number; `docs/explanation/theory.md` has the derivations."""

from __future__ import annotations

from typing import NamedTuple


class Erratum(NamedTuple):
    """An error of the paper: the printed text, the correct one, and where this package uses it."""

    printed: str
    right: str
    here: str


ERRATA: dict[int, Erratum] = {
    1: Erratum("u^t = mean_i x_iK^t (main text)", "u^{t+1} = mean_i x_iK^t (appendix)", "runs.auxiliary"),
    2: Erratum("P with (1 - 2 gamma^2), once", "P with (1 - 2 gamma)^2", "setting.P"),
    3: Erratum("+lam gamma g_hat_i^t in the proof of (4)", "g_hat_i^{t-1}", "-"),
    4: Erratum("Phi carries a factor lam", "it has none after the division by lam kappa", "forms from `consistent` on"),
    5: Erratum("64 eta L^2 K mean||g_hat_i^0||^2", "eta^2", "forms from `consistent` on"),
    6: Erratum("2 (F(z^1) - F*)", "the factor 2 is not needed", "forms from `consistent` on"),
    7: Erratum("the two limits on rho and eta", "leave kappa = -1/2; their shares must add up to < 1/2", "kappa > 0"),
    8: Erratum("eta <= 2 lam", "eta <= lam: above it the gamma_k alternate in sign", "Setting refuses eta > lam"),
    9: Erratum(
        "no limit on lam L",
        "a limit is needed: the proof uses P <= 2, and without it the theorem is false",
        "docs/gallery/plot_counterexample.py",
    ),
    10: Erratum(
        "4 lam^3 L^2 (..) against 1/m^2", "||mean||^2 throughout: 8 L^2 r^2 + lam L <= 1", "forms from `consistent` on"
    ),
    11: Erratum(
        "E||g_tilde||^2 cancels against ||E g_tilde||^2",
        "a noise term lam L W sigma_l^2/m remains, and the condition is twice as strict",
        "forms `corrected`, `tracking`",
    ),
    12: Erratum("2(P-1)/3 in the c_k recursion", "(11P-2)/3", "form `corrected`"),
    13: Erratum(
        "a = 1 'for convenience'", "needs eta >= lam/2; any a > 0 may be chosen", "`corrected`: the best a; `tracking`"
    ),
    14: Erratum("gamma_1/gamma_0 = 1 - eta/lam", "the inverse: gamma_k increases with k", "setting.gamma_k"),
    15: Erratum(
        "g2 unbiased at the perturbed point",
        "it uses the minibatch that defines the point: (1 + alpha L rho)^2 sigma_l^2, with L-smooth minibatch losses",
        "forms `corrected`, `tracking`",
    ),
    16: Erratum(
        "penalty beta ||grad||^2 (main text)", "(beta/2) ||grad||^2 (appendix)", "docs/gallery/plot_perturbation.py"
    ),
    17: Erratum("'Proof of Theorem 4.5'", "of Theorem 4.4", "-"),
    18: Erratum(
        "K >= lam/eta in the theorem", "fails in every main experiment of the paper", "`fedspeed theory --from RUN`"
    ),
}
