r"""
The dual variables: what a client knows of the others
=====================================================

FedSpeed's client keeps one vector, :math:`h_i`, the sum of its own past movements. In the paper's symbols it is
:math:`-\lambda` times the prox correction; read as a constrained problem, :math:`h_i/\lambda` is the dual variable of
"my model equals the server's". When everything stands still, a client's local step must vanish,

.. math:: \nabla F_i(x^*) + \tfrac{1}{\lambda}\,(h_i + x^* - x^*) = 0
   \quad\Longrightarrow\quad h_i = -\lambda\,\nabla F_i(x^*) :

each client ends up holding exactly minus its own gradient at an optimum that was never sent to it.

**What to see.** Eight clients on two-dimensional quadratics, all active, exact gradients, no perturbation. Left:
:math:`h_i/\lambda` of every client, a dot per round, from 0 to the rings, which are :math:`-\nabla F_i(x^*)` from a
closed form. Right: the largest distance between dot and ring falls in a straight line, down to rounding.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedspeed
from fedspeed.data.problems import random_quadratic

LAM = 2.0

problem = random_quadratic(8, d=2, n=1, mu=0.3, shared=False, seed=3)
scale = np.sqrt(problem.d / 2)  # turns the mean over d samples into F_i(x) = 1/2 ||A_i x - y_i||^2
rows = np.arange(8 * problem.d).reshape(8, problem.d)
data = fedspeed.Federated.from_arrays(scale * problem.A.reshape(-1, problem.d), scale * problem.y.reshape(-1, 1), rows)
model = torch.nn.Linear(problem.d, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
truth = -problem.gradient(np.broadcast_to(problem.optimum, (8, 2)))

run = fedspeed.simulate(
    fedspeed.FedSpeed(lam=LAM, rho=0), model, data, rounds=100, active=8, local_steps=20, lr=0.1, lr_decay=1.0,
    weight_decay=0.0, loss=torch.nn.functional.mse_loss, backend="serial",
)  # fmt: skip
history = []
for _ in run:
    history.append(np.stack([run.client_state(i).h.numpy() for i in range(8)]) / LAM)
errors = [float(np.linalg.norm(duals - truth, axis=1).max()) for duals in history]

# %%
# The state of a client is a value one can read between rounds: ``run.client_state(i)``.

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
paths = np.concatenate([np.zeros((1, 8, 2)), history])
left.plot(paths[:, :, 0], paths[:, :, 1], ".-", color="#0072B2", linewidth=1, markersize=4)
left.plot(*truth.T, "o", color="#D55E00", fillstyle="none", markersize=11, markeredgewidth=2)
left.set(
    aspect="equal",
    xlabel="first coordinate",
    ylabel="second coordinate",
    title=r"$h_i / \lambda$ (dots) and $-\nabla F_i(x^*)$ (rings)",
)
left.margins(0.1)
left.grid(alpha=0.3)
right.semilogy(errors, color="#0072B2", linewidth=2)
right.set(xlabel="round", ylabel=r"largest $||h_i / \lambda + \nabla F_i(x^*)||$")
right.grid(alpha=0.3)
plt.show()
