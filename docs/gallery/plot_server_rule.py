r"""
One line of FedSpeed: the rule as printed and as released
=========================================================

Line 16 of FedSpeed's box averages the corrected models of the *active* clients. The authors' code adds the mean
correction of *all* clients. With all clients active the two are equal; with a part of the clients they are not, and
this package takes the second (``server="all"``). ``server="active"`` is the paper's.

**What to see.** Ten of a hundred clients in each round, quadratics, exact gradients. As printed, the server's model
jumps about and stays at a distance: the corrections of ten clients do not cancel as those of a hundred do. Where it
stays was known before the run. At the fixed point the corrections are :math:`h_i = -\lambda \nabla F_i(x^*)`, and the
mean of S of N of them drawn without replacement has the standard deviation

.. math:: \lambda \sqrt{\frac{1 - S/N}{S}\; \mathrm{tr}\,\mathrm{Cov}\, \nabla F_i(x^*)}\,,

the dotted line. As released, it converges.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedspeed
from fedspeed.data.problems import random_quadratic

N, S, LAM = 100, 10, 2.0

problem = random_quadratic(N, d=10, n=1, mu=0.2, seed=1)
scale = np.sqrt(problem.d / 2)  # turns the mean over d samples into F_i(x) = 1/2 ||A_i x - y_i||^2
rows = np.arange(N * problem.d).reshape(N, problem.d)
data = fedspeed.Federated.from_arrays(scale * problem.A.reshape(-1, problem.d), scale * problem.y.reshape(-1, 1), rows)
model = torch.nn.Linear(problem.d, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
gradients = problem.gradient(np.broadcast_to(problem.optimum, (N, problem.d)))
predicted = LAM * float(np.sqrt((1 - S / N) / S * np.square(gradients).sum() / (N - 1)))


def distances(server: str) -> list[float]:
    """From the optimum, after every round."""
    run = fedspeed.simulate(
        fedspeed.FedSpeed(lam=LAM, rho=0, server=server), model, data, rounds=200, active=S, local_steps=10, lr=0.5,
        lr_decay=1.0, weight_decay=0.0, loss=torch.nn.functional.mse_loss, backend="serial",
    )  # fmt: skip
    return [float(np.linalg.norm(run.x.numpy() - problem.optimum)) for _ in run]


curves = {server: distances(server) for server in ("active", "all")}

# %%
# ``fedspeed methods fedspeed --errata`` has the whole list of where paper, public code and this package differ.

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
axis.semilogy(curves["active"], color="#D55E00", linewidth=1.5, label='as printed, server="active"')
axis.semilogy(curves["all"], "--", color="#0072B2", linewidth=2, label='as released, server="all"')
axis.axhline(predicted, color="black", linestyle=":", linewidth=2, label="predicted level of the printed rule")
axis.set(xlabel="round", ylabel="distance to the optimum")
axis.grid(alpha=0.3)
axis.legend()
plt.show()
