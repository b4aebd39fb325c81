"""Toy implementations for `fedspeed audit`, written from the boxes, with mistakes that can be switched on."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import torch


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


class Averaging:
    """A Flower strategy without Flower: parameters are unpacked and packed as Flower does."""

    wrong = ""

    def aggregate_fit(self, server_round, results, failures):
        lists = [[np.load(io.BytesIO(b)) for b in reply.parameters.tensors] for _, reply in results]
        count = sum(reply.num_examples for _, reply in results) + (2 if self.wrong else 0)
        means = [sum(layers) / count for layers in zip(*lists, strict=True)]
        packed = []
        for mean in means:
            file = io.BytesIO()
            np.save(file, mean)
            packed.append(file.getvalue())
        return SimpleNamespace(tensors=packed, tensor_type="numpy.ndarray"), {}


class FedAvgM:
    """A strategy on plain lists of arrays with a momentum: FedAdam with beta2 = 1, v0 = 1, tau = 0."""

    def __init__(self, initial_parameters, beta1, eta_g):
        self.x, self.beta1, self.eta_g = list(initial_parameters), beta1, eta_g
        self.m = [0 * a for a in self.x]

    def aggregate_fit(self, server_round, results, failures):
        n = len(results)
        means = [sum(layers) / n for layers in zip(*(reply.parameters for _, reply in results), strict=True)]
        self.m = [self.beta1 * m + (1 - self.beta1) * (a - x) for m, a, x in zip(self.m, means, self.x, strict=True)]
        self.x = [x + self.eta_g * m for x, m in zip(self.x, self.m, strict=True)]
        return self.x, {}


class Server:
    """SCAFFOLD with hooks and vectors as FL-Simulator names them."""

    wrong = ""

    def __init__(self, device, model_func, init_model, init_par_list, datasets, method, args):
        self.args, self.c = args, torch.zeros(len(init_par_list))
        self.ci = torch.zeros(args.total_client, len(init_par_list))
        self.comm_vecs = {"Params_list": init_par_list.clone(), "correction": None}
        self.server_model_params_list = init_par_list
        self.delta, self.lr = 0 * self.c, args.local_learning_rate
        self.K = len(datasets.client_x[0]) / args.batchsize * args.local_epochs

    def process_for_communication(self, client, mean_update):
        self.comm_vecs["Params_list"].copy_(self.server_model_params_list)
        self.comm_vecs["correction"] = self.c - self.ci[client]

    def global_update(self, selected, mean_update, mean_model):
        self.c = self.c + self.delta / (len(selected) if self.wrong == "divided by S" else self.args.total_client)
        self.delta = 0 * self.c
        return self.server_model_params_list + self.args.global_learning_rate * mean_update

    def postprocess(self, client, received):
        new = self.ci[client] - self.c - received["local_update_list"] / self.K / self.lr
        self.delta += new - self.ci[client]
        self.ci[client] = new


class Client:
    """Its other half: torch, autograd, a loader of batches."""

    wrong = ""

    def __init__(self, device, model_func, received_vecs, dataset, lr, args):
        self.model, self.received = model_func(), received_vecs
        torch.nn.utils.vector_to_parameters(received_vecs["Params_list"].clone(), self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.loss = torch.nn.CrossEntropyLoss()
        self.dataset = [dataset]

    def train(self):
        for inputs, labels in self.dataset:
            loss = self.loss(self.model(inputs), labels.reshape(-1).long())
            flat = torch.nn.utils.parameters_to_vector(self.model.parameters())
            term = flat @ self.received["correction"]
            loss = loss + (term.item() if self.wrong else term)  # a number has no gradient
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        x = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        return {"local_update_list": x - self.received["Params_list"], "local_model_param_list": x}


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
