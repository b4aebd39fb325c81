"""
Splits: who owns what
=====================

A split decides which client owns which sample, and with it how hard a federation is. Here are four of the 1437 digits
over 20 clients. Each column is a client, each row a digit, each cell the share of that digit in the client's data.

**What to see.** ``iid`` is one even tint: every client could train alone. ``dirichlet:1`` is patchy, under
``dirichlet:0.1`` two or three digits make up most of what a client has, and ``shards:2``, which cuts the sorted data
into pieces and deals two to each client, leaves nothing but those. The fewer cells share the colour, the further
apart the clients' gradients point.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedspeed

SPLITS = ("iid", "dirichlet:1", "dirichlet:0.1", "shards:2")


def owned(split: str) -> np.ndarray:
    """How many samples of each class (rows) each client (columns) owns."""
    data = fedspeed.load_data("digits", split=split, clients=20)
    labels = data.y.numpy()
    return np.stack([np.bincount(labels[data.rows(i)], minlength=10) for i in range(data.clients)], axis=1)


counts = {split: owned(split) for split in SPLITS}

# %%
# A command shows the same of any data set: ``fedspeed data show digits --split dirichlet:0.1 --clients 20``.

figure, axes = plt.subplots(2, 2, figsize=(8, 5.2), sharex=True, sharey=True, layout="constrained")
for axis, (split, count) in zip(axes.flat, counts.items(), strict=True):
    image = axis.imshow(count / count.sum(0), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axis.set_title(f"{split}: {(count > 0).sum(0).mean():.1f} of 10 digits per client", fontsize=10)
    axis.set_yticks(range(10))
for axis in axes[-1]:
    axis.set_xlabel("client")
    axis.set_xticks(range(0, 20, 5))
for axis in axes[:, 0]:
    axis.set_ylabel("digit")
figure.colorbar(image, ax=axes, label="share of the client's samples")
plt.show()
