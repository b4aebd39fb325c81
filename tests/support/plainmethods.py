"""Every method as a few lines of NumPy, in the form of its box: what travels up, and the server's step.

For `plain.py`. It knows nothing of the package, only the boxes of its documentation. `job` is `oracle.Job`: what a
client knows in a round, with `job.centre` for the model it received. An upload is a dict of vectors in the order of the
box, a client's state a dict of vectors too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import Job, unit

Vec = np.ndarray
Tree = dict[str, Any]


class FedAvg:
    """The parts of a method; others replace some of them."""

    fields: dict[str, Any] = {"eta_g": 1.0}

    def __init__(self, x0: Vec, **fields: Any) -> None:
        vars(self).update(self.fields | fields)
        self.x = x0
        self.begin(np.zeros_like(x0))

    def begin(self, zero: Vec) -> None:
        """What the server keeps beside x."""

    def first(self, x0: Vec) -> Tree:
        """A client's state before its first turn."""
        return {}

    def sent(self) -> Vec:
        """The model that clients receive."""
        return self.x

    def start(self, received: Vec, mine: Tree) -> Vec:
        return received

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return job.grad(k, x)

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return self.gradient(job, k, x, mine) + job.l2(x)

    def rates(self, job: Any) -> list[float]:
        return [job.lr] * job.K

    def turn(self, job: Job, mine: Tree) -> tuple[Tree, Tree]:
        """What a client sends, and what it keeps."""
        x = job.descend(lambda k, x: self.direction(job, k, x, mine), self.rates(job))
        return self.reply(job, x, x - job.centre, mine)

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        return {"D": D}, mine

    def settled(self, mine: Tree, mean: Tree) -> Tree:
        """A counted client's state, once the mean is known."""
        return mine

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        """The server's step. share: the weight of those who replied, as a part of all; K: their mean steps."""
        self.x = self.x + self.eta_g * mean["D"]


class FedProx(FedAvg):
    fields = {"eta_g": 1.0, "mu": 0.1}

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, mine) + self.mu * (x - job.centre)


class FedSAM(FedAvg):
    fields = {"eta_g": 1.0, "rho": 0.1}

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return job.sam(k, x, self.rho, 1.0)


class Old(FedAvg):
    """FedLESAM's ascent: away from the model that the client received the last time, none the first time."""

    def first(self, x0: Vec) -> Tree:
        return {**super().first(x0), "old": x0, "seen": np.zeros(1)}

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return job.grad(k, x + self.rho * mine["seen"] * unit(mine["old"] - job.centre))

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        up, kept = super().reply(job, x, D, mine)
        return up, {**kept, "old": job.centre, "seen": np.ones(1)}


class FedLESAM(Old):
    fields = {"eta_g": 1.0, "rho": 0.1}


class FedSWA(FedAvg):
    """The rate falls over the steps that the client was asked for; one that stops early has had the first of them."""

    fields = {"rho": 0.1, "alpha": 1.5}

    @property
    def eta_g(self) -> float:
        return self.alpha

    def rates(self, job: Any) -> list[float]:
        return [job.lr * (1 - (1 - self.rho) * k / job.planned) for k in range(job.K)]


class FedMoSWA(FedSWA):
    fields = {"rho": 0.1, "alpha": 1.5, "gamma": 0.2}

    def begin(self, zero: Vec) -> None:
        self.m = zero

    def first(self, x0: Vec) -> Tree:
        return {"c": np.zeros_like(x0)}

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, mine) - mine["c"] + self.m

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        c = mine["c"] - self.m - D / sum(self.rates(job))
        return {"D": D, "dm": c - self.m}, {"c": c}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.m = self.m + self.gamma * mean["dm"]


class FedAdam(FedAvg):
    fields = {"eta_g": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "v0": 0.0}

    def begin(self, zero: Vec) -> None:
        self.m, self.v = zero, zero + self.v0

    def second(self, square: Vec) -> Vec:
        return self.beta2 * self.v + (1 - self.beta2) * square

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        self.m = self.beta1 * self.m + (1 - self.beta1) * mean["D"]
        self.v = self.second(mean["D"] ** 2)
        self.x = self.x + self.eta_g * self.m / (np.sqrt(self.v) + self.tau)


class FedYogi(FedAdam):
    def second(self, square: Vec) -> Vec:
        return self.v - (1 - self.beta2) * square * np.sign(self.v - square)


class FedAdagrad(FedAdam):
    fields = {"eta_g": 0.1, "beta1": 0.0, "tau": 1e-3, "v0": 0.0}

    def second(self, square: Vec) -> Vec:
        return self.v + square


class FedNova(FedAvg):
    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        return {"d": D / job.K, "a": np.array([float(job.K)])}, mine

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        self.x = self.x + self.eta_g * mean["a"] * mean["d"]


class Scaffold(FedAvg):
    def begin(self, zero: Vec) -> None:
        self.c = zero

    def first(self, x0: Vec) -> Tree:
        return {"c": np.zeros_like(x0)}

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, mine) - mine["c"] + self.c

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        change = -self.c - D / (job.K * job.lr)
        return {"D": D, "dc": change}, {"c": mine["c"] + change}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.c = self.c + share * mean["dc"]


class FedGamma(Scaffold, FedSAM):
    fields = {"eta_g": 1.0, "rho": 0.01}


class FedLESAMS(Old, Scaffold):
    fields = {"eta_g": 1.0, "rho": 0.1}


class FedCM(FedAvg):
    fields = {"eta_g": 1.0, "alpha": 0.1}

    def begin(self, zero: Vec) -> None:
        self.Delta = zero

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return self.alpha * super().direction(job, k, x, mine) + (1 - self.alpha) * self.Delta

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.Delta = -mean["D"] / (K * lr)


class MoFedSAM(FedCM, FedSAM):
    fields = {"eta_g": 1.0, "alpha": 0.1, "rho": 0.1}


class FedWMSAM(Scaffold):
    fields = {"eta_g": 1.0, "rho": 0.01, "alpha": 0.1}

    def begin(self, zero: Vec) -> None:
        self.c, self.Delta, self.a = zero, zero, np.array([self.alpha])

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        P = self.Delta + self.a / (1 - self.a) * (self.c - mine["c"])
        fresh = job.grad(k, x + self.rho * unit(job.centre + k * P - x))
        return self.a * fresh + (1 - self.a) * P + job.l2(x)

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        up, kept = super().reply(job, x, D, mine)
        size = np.linalg.norm(D) * np.linalg.norm(self.Delta)
        return {**up, "v": np.array([1 + D @ self.Delta / size if size else 0.0])}, kept

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.Delta = -mean["D"] / (K * lr)
        self.a = 0.99 * self.a + 0.01 * np.clip(mean["v"], 0.1, 0.9)


class Dual(FedAvg):
    """h_i is the sum of a client's own D_i, H the mean of all h_i; w = 1/lam weighs the prox term."""

    fields = {"lam": 10.0}

    @property
    def w(self) -> float:
        return 1 / self.lam

    def begin(self, zero: Vec) -> None:
        self.H = zero

    def first(self, x0: Vec) -> Tree:
        return {"h": np.zeros_like(x0)}

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, mine) + self.w * (mine["h"] + x - job.centre)

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        return {"D": D}, {"h": mine["h"] + D}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        self.H = self.H + share * mean["D"]
        self.x = self.x + mean["D"] + self.H


class FedDyn(Dual):
    fields = {"alpha": 0.1}

    @property
    def w(self) -> float:
        return self.alpha


class FedSpeed(Dual):
    fields = {"lam": 10.0, "rho": 0.1, "alpha": 1.0, "ascent_fraction": 1.0, "server": "all", "correction": True}

    def first(self, x0: Vec) -> Tree:
        return super().first(x0) if self.correction else {}

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        g1 = job.grad(k, x, self.ascent_fraction)
        return (1 - self.alpha) * g1 + self.alpha * job.grad(k, x + self.rho * unit(g1))

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, mine or {"h": 0.0})

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        if not self.correction:
            return {"D": D}, {}
        up, kept = super().reply(job, x, D, mine)
        return {"D": D + kept["h"]} if self.server == "active" else up, kept

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        if self.correction and self.server == "all":
            super().update(mean, share, K, lr)
        else:
            self.x = self.x + mean["D"]


class FedLESAMD(Old, Dual):
    fields = {"lam": 10.0, "rho": 0.1}


class FedTOGA(Dual):
    fields = {"lam": 10.0, "rho": 0.1, "kappa": 1.0, "beta": 0.9}

    def begin(self, zero: Vec) -> None:
        self.H, self.Delta = zero, zero

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        e = self.rho * unit(job.grad(k, x) + self.kappa * self.Delta)
        return job.grad(k, x + e) + self.beta * self.Delta

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.Delta = -mean["D"] / K


class FedSMOO(Dual):
    fields = {"lam": 10.0, "rho": 0.1}

    def begin(self, zero: Vec) -> None:
        self.H, self.s = zero, zero

    def first(self, x0: Vec) -> Tree:
        return {"h": np.zeros_like(x0), "mu": np.zeros_like(x0)}

    def turn(self, job: Job, mine: Tree) -> tuple[Tree, Tree]:
        return super().turn(job, dict(mine))  # mu changes at every step

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        e = self.rho * unit(job.grad(k, x) - mine["mu"] - self.s)
        mine["mu"] = mine["mu"] + e - self.s
        return job.grad(k, x + e)

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        return {"D": D, "mu": mine["mu"]}, {"h": mine["h"] + D, "mu": mine["mu"]}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.s = self.rho * unit(mean["mu"])


class FedGMT(Dual):
    fields = {"gamma": 1.0, "alpha": 0.95, "tau": 3.0, "lam": 10.0}

    def begin(self, zero: Vec) -> None:
        self.H, self.e = zero, self.x

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return job.grad(k, x, 1.0, self.gamma, self.e, self.tau) + job.l2(x) + self.w * mine["h"]

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.e = self.alpha * self.e + (1 - self.alpha) * self.x


class FedGloSS(Dual):
    fields = {"lam": 10.0, "rho": 0.15, "rho_l": 0.15}

    def begin(self, zero: Vec) -> None:
        self.H, self.G = zero, zero

    def sent(self) -> Vec:
        return self.x - self.rho * unit(self.G)

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return job.sam(k, x, self.rho_l, 1.0)

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, share, K, lr)
        self.G = mean["D"]


class FedADMM(Dual):
    fields = {"lam": 10.0, "variant": "wang", "eta_g": 1.0}

    def first(self, x0: Vec) -> Tree:
        return {"h": np.zeros_like(x0), **({} if self.variant == "active" else {"xh": x0})}

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        h = mine["h"] + D
        if self.variant == "active":
            return {"dxh": x + h - job.centre}, {"h": h}
        return {"dxh": x + h - mine["xh"]}, {"h": h, "xh": x + h}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        self.x = self.x + {"wang": share, "gong": self.eta_g, "active": 1.0}[self.variant] * mean["dxh"]


class FedPD(Dual):
    def first(self, x0: Vec) -> Tree:
        return {"x": x0, "h": np.zeros_like(x0)}

    def start(self, received: Vec, mine: Tree) -> Vec:
        return mine["x"]

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        h = mine["h"] + D
        return {"xh": D + h}, {"x": x, "h": h}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        self.x = self.x + mean["xh"]


class AFedPD(Dual):
    """Clients keep q_i = h_i - H, which stands still while they are absent."""

    def first(self, x0: Vec) -> Tree:
        return {"q": np.zeros_like(x0)}

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, {"h": mine["q"] + self.H})

    def reply(self, job: Job, x: Vec, D: Vec, mine: Tree) -> tuple[Tree, Tree]:
        return {"D": D}, {"q": mine["q"] + D}

    def settled(self, mine: Tree, mean: Tree) -> Tree:
        return {"q": mine["q"] - mean["D"]}

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        super().update(mean, 1.0, K, lr)


class AFedPDSAM(AFedPD, FedSAM):
    fields = {"lam": 10.0, "rho": 0.1}


class FedACG(FedAvg):
    fields = {"gamma": 0.85, "beta": 0.002}

    def begin(self, zero: Vec) -> None:
        self.m = zero

    def sent(self) -> Vec:
        return self.x + self.gamma * self.m

    def direction(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        return super().direction(job, k, x, mine) + self.beta * (x - job.centre)

    def update(self, mean: Tree, share: float, K: float, lr: float) -> None:
        self.m = self.gamma * self.m + mean["D"]
        self.x = self.x + self.m


class FedNSAM(FedACG):
    fields = {"gamma": 0.85, "rho": 0.05, "ascent": "local", "beta": 0.0}

    def gradient(self, job: Job, k: int, x: Vec, mine: Tree) -> Vec:
        if self.ascent == "momentum":
            return job.grad(k, x - self.rho * unit(self.m))
        return job.sam(k, x, self.rho, 1.0)


ALL = [FedAvg, FedProx, FedAdam, FedYogi, FedAdagrad, FedNova, Scaffold, FedCM, FedDyn, FedADMM, FedPD, FedSpeed]
ALL += [FedSAM, MoFedSAM, FedGamma, FedSMOO, FedLESAM, AFedPD, AFedPDSAM, FedGloSS, FedACG, FedNSAM, FedWMSAM]
ALL += [FedTOGA, FedLESAMD, FedLESAMS, FedSWA, FedMoSWA, FedGMT]
METHODS = {cls.__name__.lower(): cls for cls in ALL}
