"""The convergence analysis as a tool: conditions, bounds, lemmas, problems with known constants. NumPy only.

The theorem comes in four named forms (`FORMS`): as printed, made consistent, corrected, and by another route that
keeps the O(1/T). `docs/theory.md` says what is proved.
"""

from .bounds import Bound, Start, bound, largest_L, phi, schedule, suggest
from .counterexample import Counterexample, counterexample
from .engine import Trace, run
from .errata import ERRATA, Erratum
from .experiment import Fit, Rate, power_law, rate, start_at
from .logistic import Logistic, random_logistic
from .perturbation import Perturbation, perturbation
from .problems import Problem, dissimilarity
from .quadratic import Quadratic, random_quadratic
from .rates import RATES, PublishedRate
from .routes import Condition, Route, kappa, route
from .sequences import Sequences, auxiliary, exact_sequences, fixed_point
from .setting import FORMS, P, Setting, gamma, gamma_k

__all__ = [
    "ERRATA", "FORMS", "RATES", "Bound", "Condition", "Counterexample", "Erratum", "Fit", "Logistic", "P",
    "Perturbation", "Problem", "PublishedRate", "Quadratic", "Rate", "Route", "Sequences", "Setting", "Start", "Trace",
    "auxiliary", "bound", "counterexample", "dissimilarity", "exact_sequences", "fixed_point", "gamma", "gamma_k",
    "kappa", "largest_L", "perturbation", "phi", "power_law", "random_logistic", "random_quadratic", "rate", "route",
    "run", "schedule", "start_at", "suggest",
]  # fmt: skip
