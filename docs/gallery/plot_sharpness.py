r"""
Sharpness: what the perturbed gradient is for
=============================================

FedSpeed takes its gradient a short step uphill (of length rho), as SAM does, so that it prefers minima whose
neighbourhood is low as well. Whether a minimum is flat can be measured: by the largest eigenvalue of the training
loss's Hessian, and by the loss along its eigenvector, the direction in which it rises fastest. ``fedspeed inspect
RUN`` does it for a run directory; these are the functions behind it.

**What to see.** Three runs on digits that differ in nothing but rho. Each curve is the training loss on a line
through the model that was found, shown from its own lowest point: the larger rho, the wider the valley. The lowest
losses are 0.08, 0.07 and 0.05, so rho costs no training loss here, only a second gradient per step. The accuracies in
the legend are of one seed: this picture says that the minimum is flatter, not that the model is better.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedspeed
from fedspeed.client.sharpness import batches, mean_gradient, top_eigenvalue
from fedspeed.utils.random import rng

data = fedspeed.load_data("digits", split="dirichlet:0.3", clients=20)
model = fedspeed.build_model("mlp", data)
sample = batches(data, np.arange(400))
steps = np.linspace(-1, 1, 21)


def valley(rho: float) -> tuple[np.ndarray, float, float]:
    """Return the training loss along the top eigenvector of a trained model, its eigenvalue, and the test accuracy."""
    run = fedspeed.simulate(
        fedspeed.FedSpeed(lam=10, rho=rho), model, data, rounds=30, active=10, local_epochs=2, batch_size=20,
        weight_decay=0.0, eval_every=30, backend="serial",
    )  # fmt: skip
    *_, last = run
    flat, loss, x = run.work.flat, run.work.loss, run.x
    inputs, targets = sample[0]
    v = x.new_tensor(rng(0, "eigenvector").standard_normal(len(x)))
    for _ in range(20):  # power iteration, as in top_eigenvalue, which keeps the vector to itself
        v = flat.hvp(x, v / v.norm(), inputs, targets, loss)
    v = v / v.norm()
    along = np.array([mean_gradient(flat, x + float(s) * v, sample, loss)[0] for s in steps])
    return along, top_eigenvalue(flat, x, sample, loss, iterations=30).value, last.test_accuracy


found = {rho: valley(rho) for rho in (0.0, 0.05, 0.2)}

# %%
# Around the minimum a curve is the parabola :math:`\frac12 \mathrm{eigenvalue}\, s^2`: the eigenvalue is its
# curvature.

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
looks = (("#D55E00", "-"), ("#009E73", "--"), ("#0072B2", "-."))
for (rho, (along, eigenvalue, accuracy)), (colour, line) in zip(found.items(), looks, strict=True):
    label = f"rho {rho:g}: eigenvalue {eigenvalue:.2f}, test {100 * accuracy:.1f}%"
    axis.plot(steps, along - along.min(), line, color=colour, linewidth=2, label=label)
axis.set(xlabel="distance from the model along the top eigenvector", ylabel="training loss above the lowest point")
axis.grid(alpha=0.3)
axis.legend(loc="upper center")
plt.show()
