r"""
Where FedAvg ends: more local steps, another optimum
====================================================

More local work saves rounds, and it changes the answer. K steps of gradient descent move client i from x to :math:`x
- M_i (x - x_i^*)`, with :math:`M_i = I - (I - \eta H_i)^K`; FedAvg stands still where the mean of these moves is 0.
For K = 1 that is the optimum of the mean loss. For K without end every client walks all the way, and it is the plain
mean of the clients' own optima, whatever the losses look like.

**What to see.** Three clients (triangles) in two dimensions and the level lines of their mean loss. The line is the
closed form for K from 1 to 100, from the optimum (star) to the mean of the triangles (square); the dots on it are
runs. FedSpeed, with the same K, ends at the star.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedspeed
from fedspeed.data.problems import Quadratic

LR = 0.5
curvatures = np.array([[1.0, 0.1], [0.1, 0.3], [0.3, 1.0]])
optima = np.array([[0.0, 0.0], [4.0, 0.5], [1.5, 3.0]])
A = np.sqrt(curvatures)[:, :, None] * np.eye(2)
problem = Quadratic(A, np.einsum("ijk,ik->ij", A, optima)[:, None])

rows = np.arange(6).reshape(3, 2)  # two samples a client: the mean of their squares is F_i(x) = 1/2 ||A_i x - y_i||^2
data = fedspeed.Federated.from_arrays(A.reshape(-1, 2), problem.y.reshape(-1, 1), rows)
model = torch.nn.Linear(2, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)


def ends(method: fedspeed.Method, K: int) -> np.ndarray:
    """Where a method stands in the end."""
    run = fedspeed.simulate(
        method, model, data, rounds=50 + 130 // K, active=3, local_steps=K, lr=LR, lr_decay=1.0, weight_decay=0.0,
        loss=torch.nn.functional.mse_loss, backend="serial",
    )  # fmt: skip
    for _ in run:
        pass
    return run.x.numpy().copy()


def fixed_point(K: int) -> np.ndarray:
    """Where FedAvg must end: the mean of the clients' optima, weighted with M_i (diagonal here)."""
    M = 1 - (1 - LR * curvatures) ** K
    return (M * optima).sum(0) / M.sum(0)


steps = (1, 4, 16)
fedavg = {K: ends(fedspeed.FedAvg(), K) for K in steps}
speedy = ends(fedspeed.FedSpeed(lam=2, rho=0), 16)
line = np.array([fixed_point(K) for K in range(1, 101)])

# %%
# The dots lie on the line to ten digits; so does FedSpeed's end on the star.

figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
u, v = np.meshgrid(np.linspace(-0.6, 4.6, 80), np.linspace(-0.6, 3.4, 80))
axis.contour(u, v, problem.value(np.stack([u, v], axis=-1)), 12, colors="#999999", linewidths=0.6)
axis.plot(*optima.T, "^", color="#009E73", markersize=10, label="the clients' own optima")
axis.plot(*line.T, color="#D55E00", linewidth=1.5, label="FedAvg's fixed point, K = 1 to 100")
for K, x in fedavg.items():
    axis.plot(*x, "o", color="#D55E00", markersize=7)
    axis.annotate(f"K = {K}", x, xytext=(9, 3), textcoords="offset points")
axis.plot(*problem.optimum, "*", color="black", markersize=15, zorder=1, label="the optimum")
axis.plot(*optima.mean(0), "s", color="black", fillstyle="none", markersize=10, label="mean of the clients' optima")
axis.plot(*speedy, "x", color="#0072B2", markersize=10, markeredgewidth=2.5, label="FedSpeed, K = 16")
axis.set(xlabel="first coordinate", ylabel="second coordinate", aspect="equal")
axis.legend(fontsize=9, loc="upper right")
plt.show()
