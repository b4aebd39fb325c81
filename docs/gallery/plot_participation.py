r"""
Participation: from one client in a hundred to all
==================================================

The active clients are drawn again in every round; a method that keeps a state at the clients works with what it knew
when it last saw them. Here are a hundred quadratics that disagree about the optimum, exact gradients, 60 rounds, and
the distance from the optimum averaged over the last ten.

**What to see.** FedAvg gains about a factor of three from a tenfold cohort, since a mean of S gradients has an error
of :math:`1/\sqrt S`, and stops at its own fixed point even if all clients take part (the dotted line, in closed form).
SCAFFOLD and FedSpeed are no better than FedAvg with one client in a hundred: what they know of a client is older than
the run. From one in ten on their states are fresh enough, and each step to the right is worth orders of magnitude.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedspeed
from fedspeed.data.problems import random_quadratic

N, K, LR = 100, 10, 0.2
problem = random_quadratic(N, d=10, n=1, mu=0.2, shared=False)
scale = np.sqrt(problem.d / 2)  # turns the mean over d samples into F_i(x) = 1/2 ||A_i x - y_i||^2
rows = np.arange(N * problem.d).reshape(N, problem.d)
data = fedspeed.Federated.from_arrays(scale * problem.A.reshape(-1, problem.d), scale * problem.y.reshape(-1, 1), rows)
model = torch.nn.Linear(problem.d, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)

cohorts = (1, 3, 10, 30, 100)
methods = {
    "FedAvg": fedspeed.FedAvg(),
    "SCAFFOLD": fedspeed.Scaffold(),
    "FedSpeed": fedspeed.FedSpeed(lam=2, rho=0),
}


def distance(method: fedspeed.Method, active: int) -> float:
    """From the optimum, the mean of the last ten of 60 rounds."""
    run = fedspeed.simulate(
        method, model, data, rounds=60, active=active, local_steps=K, lr=LR, lr_decay=1.0, weight_decay=0.0,
        loss=torch.nn.functional.mse_loss, backend="serial",
    )  # fmt: skip
    far = [float(np.linalg.norm(run.x.numpy() - problem.optimum)) for _ in run]
    return float(np.mean(far[-10:]))


found = {name: [distance(method, active) for active in cohorts] for name, method in methods.items()}

# %%
# Where FedAvg ends: K steps of client i are :math:`x \mapsto x - (I - (I - \eta H_i)^K)(x - x_i^*)`, and the mean of
# these must vanish.

moved = np.eye(problem.d) - np.linalg.matrix_power(np.eye(problem.d) - LR * problem.H, K)
own = np.linalg.solve(problem.H, problem.v[:, :, None])
end = np.linalg.solve(moved.mean(0), (moved @ own).mean(0))[:, 0]
floor = float(np.linalg.norm(end - problem.optimum))

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
looks = (("#D55E00", "o-"), ("#009E73", "s--"), ("#0072B2", "^-."))
for (name, far), (colour, line) in zip(found.items(), looks, strict=True):
    axis.loglog(cohorts, far, line, color=colour, linewidth=2, label=name)
axis.axhline(floor, color="black", linestyle=":", linewidth=1.5, label="FedAvg's fixed point")
axis.set(xlabel="clients active in a round, of 100", ylabel="distance to the optimum after 60 rounds")
axis.set_xticks(cohorts, [str(active) for active in cohorts])
axis.grid(alpha=0.3)
axis.legend()
plt.show()
