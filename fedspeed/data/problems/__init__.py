"""Problems with known constants: L, sigma_g, sigma_l, the minimiser and the minimum. NumPy only."""

from __future__ import annotations

from .logistic import Logistic as Logistic
from .logistic import random_logistic as random_logistic
from .problem import Grad as Grad
from .problem import Problem as Problem
from .problem import dissimilarity as dissimilarity
from .quadratic import Quadratic as Quadratic
from .quadratic import random_quadratic as random_quadratic
