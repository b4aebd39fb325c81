"""An adapter to begin with: FedAvg, which conforms; `fedspeed audit --template` prints this file below the line."""

from __future__ import annotations

TEMPLATE = '''\
"""An adapter for `fedspeed audit`: put your own code behind client and server, on flat NumPy vectors."""

import numpy as np


class Mine:
    # ask by name for what you need: x0 (the first model), clients (N), active (S), local_steps (K), lr, lr_decay,
    # rounds, dim (d), seed, and the fields of the method (lam, rho, ...; `fedspeed methods NAME` has them)
    def __init__(self, x0, clients, local_steps, lr, lr_decay):
        self.K, self.lr, self.lr_decay = local_steps, lr, lr_decay
        self.c = np.zeros((clients, len(x0)))  # what each client keeps between rounds; FedAvg has no use for it

    def client(self, i, x, grad, t):
        """Client i in round t = 0, 1, ...: from the server's x, grad(y) being the gradient of ITS loss at y."""
        y = x.copy()
        for _ in range(self.K):
            y -= self.lr * self.lr_decay**t * grad(y)
        return y  # x_K, or a tuple (x_K, whatever else it sends)

    def server(self, x, replies, t):
        """The next model, from the last one and {i: what client i returned}."""
        return np.mean(list(replies.values()), axis=0)

    # optional: states under our names (`fedspeed methods NAME`: client keeps, server keeps), compared as well
    # def client_state(self, i): return {"c": self.c[i]}
    # def server_state(self): return {}
'''
