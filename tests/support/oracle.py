"""An independent NumPy transcription of the federated methods: the truth the package is tested against.

Written from `paper/ALGORITHMS.md` (cited as A, e.g. A 3.1), the boxes of later papers as public repositories quote them
(METHODS, its section) and Algorithm 1 of the FedSpeed paper, in the form
in which the papers print the methods: every client's state is kept and every average over all clients is
taken literally. It imports nothing of the package. Slow and plain on purpose; arrays never change in place.

Notation (A 1): x = x^t server model, x_iK local model after K steps, Delta_i = x_iK - x^t, w = 1/lam prox
weight, ghat_i prox correction. All means are weighted with p_i (uniform: p_i = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

Vec = np.ndarray
SMALL = 1e-7  # added to a norm before dividing by it (A 1)


def unit(v: Vec) -> Vec:
    """v / (||v|| + 1e-7), global L2 norm."""
    return v / (np.linalg.norm(v) + SMALL)


@dataclass
class Job:
    """What client i knows in round t. `centre` is the model it received, `start` its x_{i,0}."""

    i: int
    t: int
    K: int
    lr: float
    centre: Vec
    start: Vec
    oracle: Callable[..., Vec]
    decay: Vec  # weight decay per coordinate
    clip: float | None
    kl: Callable[..., Vec] | None = None  # gradient of KL(teacher || x) at a temperature, same minibatch

    def grad(self, k: int, x: Vec, fraction: float = 1.0, gamma: float = 0.0, teacher: Vec | None = None,
             tau: float = 1.0) -> Vec:  # fmt: skip
        """Minibatch gradient of the loss (plus gamma tau^2 KL, if there is a teacher), clipped at every call."""
        g = np.array(self.oracle(self.i, self.t, k, x, fraction=fraction), dtype=np.float64)
        if teacher is not None:
            g = g + gamma * tau**2 * self.kl(self.i, self.t, k, x, teacher, tau)
        norm = np.linalg.norm(g)
        if self.clip is not None and norm > self.clip:
            g = g * (self.clip / norm)
        return g

    def sam(self, k: int, x: Vec, rho: float, fraction: float) -> Vec:
        """g2 = grad F_i(x + rho * g1 / ||g1||), same batch (A 3.10). No weight decay in the ascent."""
        return self.grad(k, x + rho * unit(self.grad(k, x, fraction)))

    def l2(self, x: Vec) -> Vec:
        """The weight decay part of g, at the unperturbed iterate."""
        return self.decay * x

    def descend(self, direction: Callable[[int, Vec], Vec], etas: Sequence[float] | None = None) -> Vec:
        """x_{i,k+1} = x_{i,k} - eta_k * direction, K times; eta_k is eta_l unless they are given."""
        x = self.start
        for k in range(self.K):
            x = x - (self.lr if etas is None else etas[k]) * direction(k, x)
        return x


@dataclass
class Replies:
    """What the server has after a round: the active clients' K_i, Delta_i and models."""

    lr: float
    K: dict[int, int]
    delta: dict[int, Vec]  # x_iK - received model
    x_K: dict[int, Vec]  # x^t + Delta_i: the local model itself, unless the relaxed start was the centre


class Method:
    defaults: dict[str, Any] = {}

    def __init__(self, hyper: Mapping[str, Any], x0: Vec, m: int, p: Vec) -> None:
        unknown = set(hyper) - set(self.defaults)
        if unknown:
            raise ValueError(f"{type(self).__name__} has no hyper-parameter {sorted(unknown)}")
        self.hp = SimpleNamespace(**{**self.defaults, **hyper})
        self.x, self.x0, self.m, self.p = x0, x0, m, p
        self.stored: dict[str, dict[int, Vec]] = {}  # client state: the paper's name -> client -> vector
        self.setup()

    def each(self, v: Vec) -> dict[int, Vec]:
        """The same initial vector for every client."""
        return {i: v for i in range(self.m)}

    def mean(self, v: Mapping[int, Any]) -> Any:
        """Weighted mean over the clients in v."""
        return sum(self.p[i] * v[i] for i in v) / sum(self.p[i] for i in v)

    def over_m(self, v: Mapping[int, Vec]) -> Vec:
        """(1/m) * sum over the clients in v; weighted: sum_v p_i v_i / sum_all p_i."""
        return sum(self.p[i] * v[i] for i in v) / sum(self.p)

    def setup(self) -> None: ...

    def sent(self) -> Vec:
        """The model that clients receive."""
        return self.x

    def start(self, i: int, received: Vec) -> Vec:
        return received

    def client(self, job: Job) -> Vec:
        """Runs the local steps, changes the client's stored state; returns x_iK."""
        raise NotImplementedError

    def server(self, r: Replies) -> dict[str, Vec]:
        """Updates self.x; returns the other server state."""
        raise NotImplementedError

    def client_state(self, i: int) -> dict[str, Vec]:
        return {name: of[i] for name, of in self.stored.items() if i in of}


class FedAvg(Method):
    """A 3.2. `g` is the hook by which the SAM methods replace the loss gradient."""

    defaults = {"eta_g": 1.0}

    def g(self, job: Job, k: int, x: Vec) -> Vec:
        return job.grad(k, x) + job.l2(x)

    def client(self, job: Job) -> Vec:
        return job.descend(lambda k, x: self.g(job, k, x))

    def server(self, r: Replies) -> dict[str, Vec]:
        self.x = self.x + self.hp.eta_g * self.mean(r.delta)
        return {}


class FedProx(FedAvg):
    """A 3.3."""

    defaults = {"eta_g": 1.0, "mu": 0.1}

    def client(self, job: Job) -> Vec:
        return job.descend(lambda k, x: self.g(job, k, x) + self.hp.mu * (x - job.centre))


class FedAdam(FedAvg):
    """A 3.4. No bias correction; the sign of the step is plus."""

    defaults = {"eta_g": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "v0": 0.0}

    def setup(self) -> None:
        self.m_ = np.zeros_like(self.x0)
        self.v = np.full_like(self.x0, self.hp.v0)

    def second_moment(self, sq: Vec) -> Vec:
        return self.hp.beta2 * self.v + (1 - self.hp.beta2) * sq

    def server(self, r: Replies) -> dict[str, Vec]:
        dbar = self.mean(r.delta)
        self.m_ = self.hp.beta1 * self.m_ + (1 - self.hp.beta1) * dbar
        self.v = self.second_moment(dbar**2)
        self.x = self.x + self.hp.eta_g * self.m_ / (np.sqrt(self.v) + self.hp.tau)
        return {"m": self.m_, "v": self.v}


class FedYogi(FedAdam):
    """A 3.4."""

    def second_moment(self, sq: Vec) -> Vec:
        return self.v - (1 - self.hp.beta2) * sq * np.sign(self.v - sq)


class FedAdagrad(FedAdam):
    """A 3.4. beta2 is accepted and plays no part."""

    defaults = {**FedAdam.defaults, "beta1": 0.0}

    def second_moment(self, sq: Vec) -> Vec:
        return self.v + sq


class FedNova(FedAvg):
    """A 3.14 with a_i = K_i."""

    def server(self, r: Replies) -> dict[str, Vec]:
        a = r.K
        d = {i: -r.delta[i] / (r.lr * a[i]) for i in r.delta}
        tau_eff = self.mean(a)
        self.x = self.x - self.hp.eta_g * r.lr * tau_eff * self.mean(d)
        return {}


class Scaffold(FedAvg):
    """A 3.5, option II. c += (1/m) sum_S (c_i^+ - c_i), taken as its invariant: the mean of all c_i."""

    def setup(self) -> None:
        self.c = np.zeros_like(self.x0)
        self.c_i = self.each(self.c)
        self.stored = {"c": self.c_i}

    def client(self, job: Job) -> Vec:
        c_i, c = self.c_i[job.i], self.c
        x_K = job.descend(lambda k, x: self.g(job, k, x) - c_i + c)
        self.c_i[job.i] = c_i - c + (job.centre - x_K) / (job.K * job.lr)
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        self.x = self.x + self.hp.eta_g * self.mean(r.delta)
        self.c = self.mean(self.c_i)
        return {"c": self.c}


class FedCM(FedAvg):
    """A 3.6. alpha weighs the fresh gradient, weight decay included."""

    defaults = {"eta_g": 1.0, "alpha": 0.1}

    def setup(self) -> None:
        self.D = np.zeros_like(self.x0)

    def client(self, job: Job) -> Vec:
        a = self.hp.alpha
        return job.descend(lambda k, x: a * self.g(job, k, x) + (1 - a) * self.D)

    def server(self, r: Replies) -> dict[str, Vec]:
        dbar, k_bar = self.mean(r.delta), self.mean(r.K)
        self.x = self.x + self.hp.eta_g * dbar
        self.D = -dbar / (k_bar * r.lr)
        return {"D": self.D}


class FedDyn(Method):
    """A 3.7, paper form: server h, division by w (= alpha)."""

    defaults = {"alpha": 0.1}

    def setup(self) -> None:
        self.h = np.zeros_like(self.x0)
        self.ghat = self.each(self.h)
        self.stored = {"ghat": self.ghat}

    def client(self, job: Job) -> Vec:
        w, ghat = self.hp.alpha, self.ghat[job.i]
        x_K = job.descend(lambda k, x: job.grad(k, x) + job.l2(x) - ghat + w * (x - job.centre))
        self.ghat[job.i] = ghat - w * (x_K - job.centre)
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        w = self.hp.alpha
        self.h = self.h - w * self.over_m(r.delta)
        self.x = self.mean(r.x_K) - self.h / w
        return {"h": self.h, "H": -self.mean(self.ghat) / self.hp.alpha}


class FedADMM(Method):
    """A 3.8. Dual z_i, stored xhat_i = x_iK + z_i / w (x^0 before the first participation)."""

    defaults = {"eta_g": 1.0, "lam": 10.0, "variant": "wang"}

    def setup(self) -> None:
        self.z = self.each(np.zeros_like(self.x0))
        self.x_i, self.xhat = self.each(self.x0), self.each(self.x0)
        self.xhat_old = dict(self.xhat)  # as they were before the round
        self.stored = {"x": self.x_i, "z": self.z, "xhat": self.xhat}

    def client(self, job: Job) -> Vec:
        w, z = 1 / self.hp.lam, self.z[job.i]
        x_K = job.descend(lambda k, x: job.grad(k, x) + job.l2(x) + z + w * (x - job.centre))
        self.z[job.i] = z + w * (x_K - job.centre)
        self.x_i[job.i], self.xhat[job.i] = x_K, x_K + self.z[job.i] / w
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        if self.hp.variant == "wang":  # the mean of the latest xhat_i of ALL clients
            self.x = self.mean(self.xhat)
        elif self.hp.variant == "gong":
            self.x = self.x + self.hp.eta_g * self.mean({i: self.xhat[i] - self.xhat_old[i] for i in r.delta})
        elif self.hp.variant == "active":
            self.x = self.mean({i: r.x_K[i] + self.hp.lam * self.z[i] for i in r.delta})
        else:
            raise ValueError(f"unknown variant {self.hp.variant!r}")
        self.xhat_old = dict(self.xhat)
        return {"H": self.hp.lam * self.mean(self.z)}


class FedPD(FedADMM):
    """A 3.9, p = 0: FedADMM with everyone active, but the local solve starts from the client's own x_i."""

    defaults = {"lam": 10.0}

    def start(self, i: int, received: Vec) -> Vec:
        return self.x_i[i]

    def server(self, r: Replies) -> dict[str, Vec]:
        if sorted(r.delta) != list(range(self.m)):
            raise ValueError("FedPD needs full participation")
        self.x = self.mean({i: r.x_K[i] + self.hp.lam * self.z[i] for i in r.delta})
        return {"H": self.hp.lam * self.mean(self.z)}


class FedSpeed(Method):
    """A 3.1, Algorithm 1 of the paper with ghat_i and lambda. Rule `all` is A 5.1 row 1."""

    defaults = {"lam": 10.0, "rho": 0.1, "alpha": 1.0, "normalise": True, "ascent_fraction": 1.0}
    defaults |= {"correction": True, "prox": True, "server": "all"}

    def setup(self) -> None:
        if self.hp.correction and not self.hp.prox:
            raise ValueError("the correction needs the prox term")
        if self.hp.server not in ("all", "active"):
            raise ValueError(f"unknown server rule {self.hp.server!r}")
        self.ghat = self.each(np.zeros_like(self.x0))
        self.stored = {"ghat": self.ghat}

    def quasi_gradient(self, job: Job, k: int, x: Vec) -> Vec:
        """Lines 7-10. With rho = 0 or alpha = 0 no ascent: one gradient, on the whole batch (A 2)."""
        rho, alpha = self.hp.rho, self.hp.alpha
        if rho == 0 or alpha == 0:
            return job.grad(k, x)
        g1 = job.grad(k, x, self.hp.ascent_fraction)
        x_breve = x + (rho / (np.linalg.norm(g1) + SMALL) if self.hp.normalise else rho) * g1
        g2 = job.grad(k, x_breve)
        return (1 - alpha) * g1 + alpha * g2

    def client(self, job: Job) -> Vec:
        lam, ghat = self.hp.lam, self.ghat[job.i]

        def direction(k: int, x: Vec) -> Vec:  # line 11
            prox = (x - job.centre) / lam if self.hp.prox else 0.0
            return self.quasi_gradient(job, k, x) + job.l2(x) - ghat + prox

        x_K = job.descend(direction)
        if self.hp.correction:  # line 13
            self.ghat[job.i] = ghat - (x_K - job.centre) / lam
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        if not self.hp.correction:
            self.x = self.mean(r.x_K)
        elif self.hp.server == "active":  # lines 14 and 16
            self.x = self.mean({i: r.x_K[i] - self.hp.lam * self.ghat[i] for i in r.x_K})
        else:
            self.x = self.mean(r.x_K) - self.hp.lam * self.mean(self.ghat)
        return {"H": -self.hp.lam * self.mean(self.ghat)}


class Sam:
    """A 3.10: `g` becomes g2 (plus the weight decay at the unperturbed iterate)."""

    hp: SimpleNamespace

    def g(self, job: Job, k: int, x: Vec) -> Vec:
        return job.sam(k, x, self.hp.rho, self.hp.ascent_fraction) + job.l2(x)


class FedSAM(Sam, FedAvg):
    """A 3.10: FedAvg with g2 for g."""

    defaults = {"eta_g": 1.0, "rho": 0.1, "ascent_fraction": 1.0}


class MoFedSAM(Sam, FedCM):
    """A 3.10: FedCM with g2 for g."""

    defaults = {"eta_g": 1.0, "rho": 0.1, "alpha": 0.1, "ascent_fraction": 1.0}


class FedGamma(Sam, Scaffold):
    """A 3.10: SCAFFOLD with g2 for g; the correction is not part of the ascent."""

    defaults = {"eta_g": 1.0, "rho": 0.01, "ascent_fraction": 1.0}


class FedSMOO(Method):
    """A 3.11. FedDyn with a dual mu_i for the ascent vector; mu_i changes at every local step."""

    defaults = {"lam": 10.0, "rho": 0.1, "ascent_fraction": 1.0}

    def setup(self) -> None:
        self.s = np.zeros_like(self.x0)
        self.ghat = self.each(self.s)
        self.mu = self.each(self.s)
        self.stored = {"ghat": self.ghat, "mu": self.mu}

    def client(self, job: Job) -> Vec:
        i, lam, ghat = job.i, self.hp.lam, self.ghat[job.i]

        def direction(k: int, x: Vec) -> Vec:
            q = job.grad(k, x, self.hp.ascent_fraction) - (self.mu[i] + self.s)
            e = self.hp.rho * unit(q)
            self.mu[i] = self.mu[i] + e - self.s
            return job.grad(k, x + e) + job.l2(x) - ghat + (x - job.centre) / lam

        x_K = job.descend(direction)
        self.ghat[i] = ghat - (x_K - job.centre) / lam
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        self.x = self.mean(r.x_K) - self.hp.lam * self.mean(self.ghat)
        self.s = self.hp.rho * unit(self.mean({i: self.mu[i] for i in r.delta}))
        return {"H": -self.hp.lam * self.mean(self.ghat), "s": self.s}


class FedLESAM(FedAvg):
    """A 3.12. One gradient per step, at x + rho * (x_old - x^t) / ||x_old - x^t||; none the first time."""

    defaults = {"eta_g": 1.0, "rho": 0.1}

    def setup(self) -> None:
        self.x_old: dict[int, Vec] = {}
        self.stored = {"x_old": self.x_old}

    def client(self, job: Job) -> Vec:
        seen = job.i in self.x_old
        e = self.hp.rho * unit(self.x_old[job.i] - job.centre) if seen else np.zeros_like(self.x0)
        self.x_old[job.i] = job.centre
        return job.descend(lambda k, x: job.grad(k, x + e) + job.l2(x))


# After FedSpeed. The boxes of METHODS.md (cited as M), in the papers' symbols.


class AFedPD(Method):
    """M 2.1. Dual variables z_i (the paper's lambda_i) of ALL clients; every absent one is updated, every round."""

    defaults = {"lam": 10.0}

    def setup(self) -> None:
        self.z = self.each(np.zeros_like(self.x0))
        self.stored = {"z": self.z}

    def gradient(self, job: Job, k: int, x: Vec) -> Vec:
        return job.grad(k, x)

    def client(self, job: Job) -> Vec:
        penalty, z = 1 / self.hp.lam, self.z[job.i]
        x_K = job.descend(lambda k, x: self.gradient(job, k, x) + job.l2(x) + z + penalty * (x - job.centre))
        self.z[job.i] = z + penalty * (x_K - job.centre)
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        average = self.mean(r.x_K)
        for i in set(range(self.m)) - set(r.x_K):
            self.z[i] = self.z[i] + (average - self.x) / self.hp.lam
        self.x = average + self.hp.lam * self.mean(self.z)
        return {"H": self.hp.lam * self.mean(self.z)}


class AFedPDSAM(AFedPD):
    """M 2.1 with the SAM gradient."""

    defaults = {"lam": 10.0, "rho": 0.1}

    def gradient(self, job: Job, k: int, x: Vec) -> Vec:
        return job.sam(k, x, self.hp.rho, 1.0) if self.hp.rho else job.grad(k, x)


class FedGloSS(Method):
    """M 2.2, with the pseudo-gradient -mean Delta_i, sigma_i = -h_i / beta and beta = lam."""

    defaults = {"lam": 10.0, "rho": 0.15, "rho_l": 0.15}

    def setup(self) -> None:
        self.pseudo = np.zeros_like(self.x0)
        self.sigma = self.each(self.pseudo)
        self.stored = {"sigma": self.sigma}

    def sent(self) -> Vec:
        return self.x + self.hp.rho * unit(self.pseudo)

    def client(self, job: Job) -> Vec:
        beta, rho, sigma = self.hp.lam, self.hp.rho_l, self.sigma[job.i]

        def direction(k: int, x: Vec) -> Vec:
            g = job.sam(k, x, rho, 1.0) if rho else job.grad(k, x)
            return g + job.l2(x) - sigma + (x - job.centre) / beta

        x_K = job.descend(direction)
        self.sigma[job.i] = sigma - (x_K - job.centre) / beta
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        self.pseudo = -self.mean(r.delta)
        self.x = self.x - self.pseudo - self.hp.lam * self.mean(self.sigma)
        return {"H": -self.hp.lam * self.mean(self.sigma)}


class FedACG(Method):
    """M 2.5. The new model is the mean local model; the momentum is how far the model came."""

    defaults = {"gamma": 0.85, "beta": 0.002}

    def setup(self) -> None:
        self.momentum = np.zeros_like(self.x0)

    def sent(self) -> Vec:
        return self.x + self.hp.gamma * self.momentum

    def client(self, job: Job) -> Vec:
        return job.descend(lambda k, x: job.grad(k, x) + job.l2(x) + self.hp.beta * (x - job.centre))

    def server(self, r: Replies) -> dict[str, Vec]:
        new = self.mean(r.x_K)
        self.momentum = new - self.x
        self.x = new
        return {"m": self.momentum}


class FedNSAM(FedACG):
    """M 2.5: no prox term; the ascent along the local gradient, or against the momentum."""

    defaults = {"gamma": 0.85, "rho": 0.05, "ascent": "local"}

    def client(self, job: Job) -> Vec:
        rho = self.hp.rho
        if self.hp.ascent == "momentum":
            return job.descend(lambda k, x: job.grad(k, x + rho * unit(-self.momentum)) + job.l2(x))
        return job.descend(lambda k, x: (job.sam(k, x, rho, 1.0) if rho else job.grad(k, x)) + job.l2(x))


class FedWMSAM(Scaffold):
    """M 2.4, weight decay outside the mix; c is the mean of all c_i. The predicted model moves on at every step."""

    defaults = {"eta_g": 1.0, "rho": 0.01, "alpha": 0.1}

    def setup(self) -> None:
        super().setup()
        self.Delta = np.zeros_like(self.x0)
        self.alpha = self.hp.alpha
        self.value: dict[int, float] = {}

    def client(self, job: Job) -> Vec:
        i, a = job.i, self.alpha
        momentum = self.Delta + a / (1 - a) * (self.c - self.c_i[i])
        x, predicted = job.start, job.centre
        for k in range(job.K):
            g = job.grad(k, x + self.hp.rho * unit(predicted - x))
            x = x - job.lr * (a * g + (1 - a) * momentum + job.l2(x))
            predicted = predicted + momentum
        delta = x - job.centre
        self.c_i[i] = self.c_i[i] - self.c - delta / (job.K * job.lr)
        size = np.linalg.norm(delta) * np.linalg.norm(self.Delta)
        self.value[i] = 1 + delta @ self.Delta / size if size else 0.0
        return x

    def server(self, r: Replies) -> dict[str, Vec]:
        self.Delta = -self.mean(r.delta) / (self.mean(r.K) * r.lr)
        self.alpha = 0.99 * self.alpha + 0.01 * min(max(self.mean({i: self.value[i] for i in r.delta}), 0.1), 0.9)
        return {**super().server(r), "Delta": self.Delta, "alpha": self.alpha}


class FedTOGA(FedSpeed):
    """M 2.7: FedSpeed (rule `all`, alpha = 1) with the last mean step in the ascent and in the direction."""

    defaults = {**FedSpeed.defaults, "kappa": 1.0, "beta": 0.9}

    def setup(self) -> None:
        super().setup()
        self.Delta = np.zeros_like(self.x0)

    def quasi_gradient(self, job: Job, k: int, x: Vec) -> Vec:
        e = self.hp.rho * unit(job.grad(k, x) + self.hp.kappa * self.Delta)
        return job.grad(k, x + e) + self.hp.beta * self.Delta

    def server(self, r: Replies) -> dict[str, Vec]:
        self.Delta = -self.mean(r.delta) / self.mean(r.K)
        return {**super().server(r), "Delta": self.Delta}


class FedLESAMD(FedDyn):
    """METHODS 2.7, after FedDyn in the paper's form: the gradient at x + e, e as FedLESAM's, none the first time."""

    defaults = {"lam": 10.0, "rho": 0.1}

    def setup(self) -> None:
        self.hp.alpha = 1 / self.hp.lam
        super().setup()
        self.last: dict[int, Vec] = {}

    def client(self, job: Job) -> Vec:
        back = self.last.get(job.i, job.centre) - job.centre  # the way the server's model came from
        e = self.hp.rho * back / (np.linalg.norm(back) + SMALL)
        self.last[job.i] = job.centre
        w, ghat = self.hp.alpha, self.ghat[job.i]
        x_K = job.descend(lambda k, x: job.grad(k, x + e) + job.l2(x) - ghat + w * (x - job.centre))
        self.ghat[job.i] = ghat - w * (x_K - job.centre)
        return x_K


class FedLESAMS(Scaffold):
    """METHODS 2.7: SCAFFOLD with the gradient at x + e."""

    defaults = {"eta_g": 1.0, "rho": 0.1}

    def setup(self) -> None:
        super().setup()
        self.last: dict[int, Vec] = {}

    def client(self, job: Job) -> Vec:
        self.back = self.last.get(job.i, job.centre) - job.centre
        self.last[job.i] = job.centre
        return super().client(job)

    def g(self, job: Job, k: int, x: Vec) -> Vec:
        e = self.hp.rho * self.back / (np.linalg.norm(self.back) + SMALL)
        return job.grad(k, x + e) + job.l2(x)


class FedSWA(FedAvg):
    """METHODS 2.6: eta_k falls within the round, the server goes alpha times as far."""

    defaults = {"rho": 0.1, "alpha": 1.5}

    def setup(self) -> None:
        self.hp.eta_g = self.hp.alpha

    def etas(self, job: Job) -> list[float]:
        return [job.lr * ((1 - k / job.K) + self.hp.rho * k / job.K) for k in range(job.K)]

    def client(self, job: Job) -> Vec:
        return job.descend(lambda k, x: self.g(job, k, x), self.etas(job))


class FedMoSWA(FedSWA):
    """METHODS 2.6, option II, with the printed sum of the rates; m is a moving average over the replies."""

    defaults = {"rho": 0.1, "alpha": 1.5, "gamma": 0.2}

    def setup(self) -> None:
        super().setup()
        self.m_ = np.zeros_like(self.x0)
        self.c_i = self.each(self.m_)
        self.stored = {"c": self.c_i}

    def client(self, job: Job) -> Vec:
        c_i, m, rho = self.c_i[job.i], self.m_, self.hp.rho
        x_K = job.descend(lambda k, x: self.g(job, k, x) - c_i + m, self.etas(job))
        self.c_i[job.i] = c_i - m + (job.centre - x_K) / (job.lr * (job.K * (1 + rho) + (1 - rho)) / 2)
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        super().server(r)
        self.m_ = (1 - self.hp.gamma) * self.m_ + self.hp.gamma * self.mean({i: self.c_i[i] for i in r.delta})
        return {"m": self.m_}


class FedGMT(Method):
    """METHODS 2.3 in the paper's symbols: dual u_m, penalty beta (lam), but for the server's mean of ALL duals."""

    defaults = {"gamma": 1.0, "alpha": 0.95, "tau": 3.0, "lam": 10.0}

    def setup(self) -> None:
        self.e = self.x0
        self.u = self.each(np.zeros_like(self.x0))
        self.stored = {"u": self.u}

    def client(self, job: Job) -> Vec:
        u, hp = self.u[job.i], self.hp
        x_K = job.descend(lambda k, x: job.grad(k, x, 1.0, hp.gamma, self.e, hp.tau) + job.l2(x) - u)
        self.u[job.i] = u - (x_K - job.centre) / hp.lam
        return x_K

    def server(self, r: Replies) -> dict[str, Vec]:
        a, beta = self.hp.alpha, self.hp.lam
        self.x = self.mean(r.x_K) - beta * self.mean(self.u)
        self.e = a * self.e + (1 - a) * self.x
        return {"H": -beta * self.mean(self.u), "e": self.e}


ALL: list[type[Method]] = [FedAvg, FedProx, FedAdam, FedYogi, FedAdagrad, FedNova, Scaffold, FedCM, FedDyn]
ALL += [FedADMM, FedPD, FedSpeed, FedSAM, MoFedSAM, FedGamma, FedSMOO, FedLESAM]
ALL += [AFedPD, AFedPDSAM, FedGloSS, FedACG, FedNSAM, FedWMSAM, FedTOGA]
ALL += [FedLESAMD, FedLESAMS, FedSWA, FedMoSWA, FedGMT]
METHODS = {cls.__name__.lower(): cls for cls in ALL}


def run(
    method: str,
    hyper: dict,
    *,
    grad: Callable[..., Vec],
    x0: Vec,
    m: int,
    cohorts: Sequence[Sequence[int]],
    lrs: Sequence[float],
    steps: Sequence[Mapping[int, int] | Sequence[int]],
    wd: float = 0.0,
    weights: Sequence[float] | None = None,
    decay_mask: Vec | None = None,
    clip: float | None = None,
    scheduled: Mapping[str, Sequence[float]] | None = None,
    kl: Callable[..., Vec] | None = None,
) -> list[dict]:
    """The rounds of A 1: one record {x, local, clients, server} per round, taken after the server update.

    hyper["relaxed_beta"] (A 3.13) starts every client at x^t + beta * (x^t - its last x_iK, or x^0). With
    hyper["relaxed_centre"] "start" (default, as released) the base method takes that point for the model it
    received and the server applies the resulting Delta_i to x^t; with "global" x^t stays the centre.
    hyper["exp"] = {"eps": ..., "decay": ...} is FedExP around the method (METHODS 2.7): its server's step is made eta_g
    times as long, and what is recorded as x is the mean of the last two models that were sent.
    `scheduled` holds hyper-parameters that have another value in every round, which its clients and server see.
    """
    hyper = dict(hyper)
    beta, centre = hyper.pop("relaxed_beta", None), hyper.pop("relaxed_centre", "start")
    exp = hyper.pop("exp", None)
    if centre not in ("start", "global"):
        raise ValueError(f"unknown relaxed_centre {centre!r}")
    x0 = np.array(x0, dtype=np.float64)
    p = np.ones(m) if weights is None else np.array(weights, dtype=np.float64)
    decay = wd * (np.ones_like(x0) if decay_mask is None else np.array(decay_mask, dtype=np.float64))
    alg = METHODS[method](hyper, x0, m, p)
    last: dict[int, Vec] = {}  # last local model of every client that has taken part
    records = []
    for t, cohort in enumerate(cohorts):
        for name, values in (scheduled or {}).items():
            setattr(alg.hp, name, values[t])
        x, local, received = alg.sent(), {}, {}
        for i in cohort:
            received[i], start = x, alg.start(i, x)
            if beta is not None:
                relaxed = x + beta * (x - last.get(i, x0))
                if centre == "start":
                    received[i], start = relaxed, alg.start(i, relaxed)
                else:
                    start = relaxed
            local[i] = alg.client(Job(i, t, steps[t][i], lrs[t], received[i], start, grad, decay, clip, kl))
        last.update(local)
        delta = {i: local[i] - received[i] for i in local}
        x_K = {i: local[i] if received[i] is x else x + delta[i] for i in local}
        server = alg.server(Replies(lrs[t], {i: steps[t][i] for i in local}, delta, x_K))
        shown = alg.x
        if exp is not None:
            square = alg.mean({i: float(D @ D) for i, D in delta.items()})
            Dbar = alg.mean(delta)
            eps = exp["eps"] * exp["decay"] ** (2 * t)
            eta_g = max(1.0, square / (2 * (float(Dbar @ Dbar) + eps)))
            alg.x = x + eta_g * (alg.x - x)
            shown = (alg.x + x) / 2
            server = {**server, "eta_g": eta_g}
        clients = {i: alg.client_state(i) for i in range(m)}
        if beta is not None:
            clients = {i: {**s, "x_last": last.get(i, x0)} for i, s in clients.items()}
        records.append({"x": shown, "local": local, "clients": clients, "server": server})
    return records
