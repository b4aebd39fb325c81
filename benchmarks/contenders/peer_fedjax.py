"""FedJAX: its own FedAvg on the default (jit) back end; the models in Haiku.

python -m benchmarks.contenders.peer_fedjax WORKLOAD [--active N] [--epochs N]
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 calls it; JAX has removed the old name
    jax.tree_map = jax.tree_util.tree_map

import fedjax
from fedjax.algorithms import fed_avg

from ..protocol import serve
from ..workloads import Workload, add_workload, asked, load

Array = Any


def cnn(x: Array) -> Array:
    """conv5x5(32)-pool-conv5x5(64)-pool-128-10 without padding."""
    x = jnp.transpose(x, (0, 2, 3, 1))
    for width in (32, 64):
        x = jax.nn.relu(hk.Conv2D(width, 5, padding="VALID")(x))
        x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return hk.Linear(10)(jax.nn.relu(hk.Linear(128)(hk.Flatten()(x))))


def mlp(x: Array) -> Array:
    """64-64-10."""
    return hk.nets.MLP([64, 10])(x)


def resnet18_gn(x: Array) -> Array:
    """ResNet-18 with group norm, as in `benchmarks.stock`."""
    x = jnp.transpose(x, (0, 2, 3, 1))
    x = jax.nn.relu(_normal(_conv(x, 64, 7, 2)))
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    for i, (a, b) in enumerate(pairwise(widths)):
        stride = 2 if i in (2, 4, 6) else 1
        y = jax.nn.relu(_normal(_conv(x, b, 3, stride)))
        y = _normal(_conv(y, b, 3, 1))
        x = jax.nn.relu(y + (x if stride == 1 and a == b else _normal(_conv(x, b, 1, stride))))
    return hk.Linear(10)(x.mean((1, 2)))


def _conv(x: Array, width: int, size: int, stride: int) -> Array:
    pad = (size // 2, size // 2)
    return hk.Conv2D(width, size, stride, padding=[pad, pad], with_bias=False)(x)


def _normal(x: Array) -> Array:
    return hk.GroupNorm(2)(x)


class Run:
    """FedAvg in FedJAX, a round at a time."""

    def __init__(self, workload: Workload) -> None:
        self.arrays = load(workload)
        self.net = hk.without_apply_rng(
            hk.transform({"cnn": cnn, "mlp": mlp, "resnet18_gn": resnet18_gn}[workload.model])
        )
        batches = fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=workload.epochs)
        self.algorithm = fed_avg.federated_averaging(
            jax.grad(self.loss), fedjax.optimizers.sgd(workload.lr), fedjax.optimizers.sgd(1.0), batches
        )
        x, y = self.arrays.x, self.arrays.y.astype(np.int32)
        clients = {b"%d" % i: {"x": np.asarray(x[i]), "y": y[i]} for i in range(workload.clients)}
        data = fedjax.InMemoryFederatedData(clients)
        self.sampler = fedjax.client_samplers.UniformGetClientSampler(data, num_clients=workload.active, seed=0)
        parameters = self.net.init(jax.random.PRNGKey(0), x[0][:2])
        self.state = self.algorithm.init(parameters)
        self.parameters = sum(leaf.size for leaf in jax.tree_util.tree_leaves(parameters))

    def loss(self, parameters: Any, batch: Any, rng: Any) -> Array:
        """Return mean cross-entropy."""
        scores = jax.nn.log_softmax(self.net.apply(parameters, batch["x"]))
        return -jnp.take_along_axis(scores, batch["y"][:, None], axis=1).mean()

    def round(self) -> None:
        """Choose clients, train, average."""
        self.state, _ = self.algorithm.apply(self.state, self.sampler.sample())
        jax.block_until_ready(self.state.params)

    def check(self) -> float:
        """Return accuracy on the test samples."""
        scores = self.net.apply(self.state.params, np.asarray(self.arrays.x_test))
        return float((np.asarray(scores).argmax(1) == self.arrays.y_test).mean())


def main() -> None:
    """Serve rounds."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    args = parser.parse_args()
    run = Run(asked(args))
    serve(run.round, run.check, parameters=run.parameters)


if __name__ == "__main__":
    main()
