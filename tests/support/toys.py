"""Toy implementations for `fedspeed audit`, written from the boxes, with mistakes that can be switched on."""

from __future__ import annotations

import numpy as np


class Toy:
    """`wrong` names the planted mistake; "" is right."""

    wrong = ""

    def __init__(self, x0, clients, active, local_steps, lr, lr_decay, **fields):
        self.N, self.S, self.K, self.lr0, self.decay = clients, active, local_steps, lr, lr_decay
        self.fields = fields
        self.h = np.zeros((clients, len(x0)))
        self.c = np.zeros(len(x0))
        if self.wrong == "one step too few":
            self.K -= 1

    def lr(self, t):
        return self.lr0 if self.wrong == "no decay" else self.lr0 * self.decay**t

    def row(self, i):
        return 0 if self.wrong == "shared state" else i


class FedAvg(Toy):
    def client(self, i, x, grad, t):
        y = x.copy()
        for _ in range(self.K):
            y -= self.lr(t) * (-1 if self.wrong == "sign" else 1) * grad(y)
        return y

    def server(self, x, replies, t):
        by = self.N if self.wrong == "divided by N" else len(replies)
        return x + sum(y - x for y in replies.values()) / by


class Scaffold(Toy):
    def client(self, i, x, grad, t):
        i, y = self.row(i), x.copy()
        ci = self.h[i]
        for _ in range(self.K):
            correction = ci - self.c if self.wrong == "sign" else self.c - ci
            y -= self.lr(t) * (grad(y) + (0 if self.wrong == "no gradient" else correction))
        new = ci - self.c + (x - y) / ((1 if self.wrong == "K is 1" else self.K) * self.lr(t))
        dc = new - ci
        if self.wrong != "lost state":
            self.h[i] = new
        return y, dc

    def server(self, x, replies, t):
        by = len(replies) if self.wrong == "divided by S" else self.N
        self.c = self.c + sum(dc for _, dc in replies.values()) / by
        return np.mean([y for y, _ in replies.values()], axis=0)

    def client_state(self, i):
        return {"c": self.h[self.row(i)]}

    def server_state(self):
        return {"c": self.c}


class FedSpeed(Toy):
    def client(self, i, x, grad, t):
        i, y, lam, rho = self.row(i), x.copy(), self.fields["lam"], self.fields["rho"]
        lam = 1 / lam if self.wrong == "inverse" else lam
        for _ in range(self.K):
            g = grad(y)
            g = grad(y + (-1 if self.wrong == "sign" else 1) * rho * g / (np.linalg.norm(g) + 1e-7))
            h = 0 if self.wrong == "no gradient" else self.h[i]
            y = y - self.lr(t) * (g + (h + y - x) / lam)
        self.h[i] = y - x if self.wrong == "lost state" else self.h[i] + y - x
        return y

    def server(self, x, replies, t):
        mean = self.h[list(replies)].mean(0) if self.wrong == "active" else self.h.mean(0)
        if self.wrong == "divided by S":
            mean = self.h.sum(0) / len(replies)
        return np.mean(list(replies.values()), axis=0) + mean

    def client_state(self, i):
        return {"h": self.h[self.row(i)]}


def planted(cls, wrong):
    """A class with a mistake."""
    return type(cls.__name__, (cls,), {"wrong": wrong})


def silent(cls):
    """The same without its states."""

    class Silent:
        def __init__(self, x0, clients, active, local_steps, lr, lr_decay, **fields):
            inner = cls(x0, clients, active, local_steps, lr, lr_decay, **fields)
            self.client, self.server = inner.client, inner.server

    return Silent
