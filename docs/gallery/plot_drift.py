r"""
Drift: how far clients walk from the server
===========================================

In a round client i starts at the server's model :math:`x^t` and ends K steps later at :math:`x_{i,K}`. The distance
between the two, averaged over clients, stands in every record (``Record.drift``, squared). Here are ten quadratics
that disagree about the optimum, with exact gradients and all clients in every round, so that nothing is noise.

**What to see.** FedAvg's clients never stop walking: at its end every client still runs towards its own optimum, and
the server averages the walks away. SCAFFOLD and FedSpeed learn how each client's gradient differs from the mean one,
subtract it, and their drift falls to nothing. On the right, what that is worth: FedAvg ends beside the optimum, the
other two at it.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedspeed
from fedspeed.data.problems import random_quadratic

problem = random_quadratic(10, d=5, n=1, mu=0.2, shared=False)
scale = np.sqrt(problem.d / 2)  # turns the mean over d samples into F_i(x) = 1/2 ||A_i x - y_i||^2
rows = np.arange(10 * problem.d).reshape(10, problem.d)
data = fedspeed.Federated.from_arrays(scale * problem.A.reshape(-1, problem.d), scale * problem.y.reshape(-1, 1), rows)
model = torch.nn.Linear(problem.d, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
methods = {
    "FedAvg": fedspeed.FedAvg(),
    "SCAFFOLD": fedspeed.Scaffold(),
    "FedSpeed": fedspeed.FedSpeed(lam=2, rho=0),
}


def trained(method: fedspeed.Method, rounds: int = 80) -> tuple[list[float], list[float]]:
    """Return the drift and the distance to the optimum of every round."""
    run = fedspeed.simulate(
        method, model, data, rounds=rounds, active=10, local_steps=10, lr=0.1, lr_decay=1.0, weight_decay=0.0,
        loss=torch.nn.functional.mse_loss, backend="serial",
    )  # fmt: skip
    drifts, distances = [], []
    for record in run:
        drifts.append(record.drift**0.5)
        distances.append(float(np.linalg.norm(run.x.numpy() - problem.optimum)))
    return drifts, distances


curves = {name: trained(method) for name, method in methods.items()}

# %%
# ``rho=0`` switches FedSpeed's perturbation off. With it the clients still come to rest, a little beside the optimum:
# where the *perturbed* gradients cancel.

figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
looks = (("#D55E00", "-"), ("#009E73", "--"), ("#0072B2", "-."))
for (name, pair), (colour, line) in zip(curves.items(), looks, strict=True):
    for axis, curve in zip(axes, pair, strict=True):
        axis.semilogy(curve, line, color=colour, label=name, linewidth=2)
axes[0].set_ylabel("drift: root mean square of $||x_{iK} - x^t||$")
axes[0].set_ylim(bottom=1e-13)
axes[1].set_ylabel("distance to the optimum")
for axis in axes:
    axis.set_xlabel("round")
    axis.grid(alpha=0.3)
axes[0].legend()
plt.show()
