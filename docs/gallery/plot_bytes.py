"""
Accuracy against bytes: what compression buys
=============================================

Rounds are not what a slow network charges for. Wrappers change what a client sends: ``topk`` sends only the largest
entries of the update and keeps the rest for its next turn (error feedback), ``quantise`` sends few bits per number.
Both go around any method; ``Record.bytes_up`` is what was really sent, indices and scales included.

**What to see.** FedSpeed on digits, 5 of 50 clients, the same 40 rounds. Per *round* the three are hard to tell
apart; against megabytes *sent up* they are far apart: 8 bits move the curve to the left by a factor of four, the
largest 5% of the entries by more than ten, an index being sent with each. What comes down to the clients is the same
for all and not counted here.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedspeed

data = fedspeed.load_data("digits", split="dirichlet:0.3", clients=50)
model = fedspeed.build_model("linear", data)
base = fedspeed.FedSpeed(lam=10, rho=0.1)
methods = {
    "all numbers, 32 bits": base,
    "quantised to 8 bits": fedspeed.Quantise(base, bits=8),
    "the largest 5%": fedspeed.TopK(base, fraction=0.05),
}


def trained(method: fedspeed.Method) -> tuple[np.ndarray, list[float]]:
    """Return megabytes sent up so far, and test accuracy in per cent, after every round."""
    run = fedspeed.simulate(method, model, data, rounds=40, active=5, batch_size=10, backend="serial")
    records = list(run)
    return np.cumsum([r.bytes_up for r in records]) / 1e6, [100 * r.test_accuracy for r in records]


curves = {name: trained(method) for name, method in methods.items()}

# %%
# On the command line: ``fedspeed compare fedspeed fedspeed+quantise:8 fedspeed+topk:0.05 --data digits --clients
# 50``, and the report has the axis as a switch.

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, (sent, accuracy)), line, colour in zip(
    curves.items(), ("-", "--", "-."), ("#0072B2", "#D55E00", "#009E73"), strict=True
):
    axis.semilogx(sent, accuracy, line, color=colour, linewidth=2, label=name)
axis.set(xlabel="megabytes that clients sent", ylabel="test accuracy (%)")
axis.grid(alpha=0.3)
axis.legend()
plt.show()
