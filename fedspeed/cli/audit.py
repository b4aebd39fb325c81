"""`fedspeed audit FILE.py:CLASS --method NAME`: a user's implementation of a method beside ours."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from ..errors import UserError
from ..methods import build
from . import options

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
Your implementation and ours run side by side on small heterogeneous quadratics, which takes a few seconds. The first
vector that differs is printed, with the lines of the method's pseudo-code that compute it. The file is executed.
Exit code: 0 if it conforms, 1 if it differs, 2 for bad input.

examples:
  fedspeed audit --list
  fedspeed audit --template > mine.py
  fedspeed audit mine.py:Mine --method fedavg
  fedspeed audit mine.py:Speed --method fedspeed --set lam=10 --rounds 8
  fedspeed audit mine.py:Mine --method scaffold --json
"""
NEEDS = """\
client(i, x, grad, t)
    client i's round t = 0, 1, ...: x_K, or a tuple (x_K, whatever else it sends)
server(x, replies, t)
    the next model from the last one and {i: what client i returned}
client_state(i), server_state()
    optional: {name: vector} under our names, compared after every round

Its constructor is given what it names: x0, the setting (clients, active, local_steps, lr, lr_decay, ...), the method's
fields. `fedspeed audit --template` prints one."""
"""What an audited class needs, printed by `fedspeed audit --list`."""

TEMPLATE = '''\
"""An adapter for `fedspeed audit`: put your own code behind client and server, on flat NumPy vectors."""

import numpy as np


class Mine:
    # ask by name for what you need: x0 (the first model), clients (N), active (S), local_steps (K), lr, lr_decay,
    # rounds, dim (d), seed, and the fields of the method (lam, rho, ...; `fedspeed methods NAME` has them)
    def __init__(self, x0, clients, local_steps, lr, lr_decay):
        self.K, self.lr, self.lr_decay = local_steps, lr, lr_decay
        self.c = np.zeros((clients, len(x0)))  # what each client keeps between rounds; FedAvg does not use it

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
"""An example class, FedAvg, which conforms; printed by `fedspeed audit --template`."""

SIZES = (
    ("rounds", int, "rounds; default 6"),
    ("clients", int, "N; default 5"),
    ("active", int, "S, clients in each round; default 3"),
    ("local_steps", int, "K; default 4"),
    ("lr", float, "local rate; default 0.1"),
    ("lr_decay", float, "its factor from round to round; default 0.9"),
    ("dim", int, "d, length of a vector; default 6"),
    ("seed", int, "of the problem and the cohorts; default 0"),
    ("tolerance", float, "largest error that is rounding; default 1e-6, which float32 meets"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the class, the method and the sizes of the setting."""
    about = "a class of yours, or a function that makes its object"
    parser.add_argument("adapter", nargs="?", metavar="FILE.py:CLASS", help=about)
    parser.add_argument("--method", metavar="NAME", help="the method that it implements; `fedspeed methods` lists them")
    about = "a field of the method such as lam=10"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=about)
    for name, kind, about in SIZES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X" if kind is float else "N", help=about)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.add_argument("--list", action="store_true", help="print the methods that the class needs")
    parser.add_argument("--template", action="store_true", help="print an example class")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print whether the class conforms, and the first difference."""
    if args.template:
        console.print(TEMPLATE, end="", soft_wrap=True)
        return 0
    if args.list:
        console.print(NEEDS)
        return 0
    if not args.adapter or not args.method:
        missing = "--method NAME" if args.adapter else "an adapter, path/to/file.py:Class"
        raise UserError(f"audit: expected {missing}; `fedspeed audit --list` says what an adapter needs")
    from ..experiments.audit import audit

    given = options.split_pairs(args.set, "--set", "FIELD=VALUE such as lam=10")
    method = build({"name": args.method, **{name.removeprefix("method."): value for name, value in given}})
    settings = {name: value for name, *_ in SIZES if (value := getattr(args, name)) is not None}
    with redirect_stdout(sys.stderr):  # what the user's code prints is not the result
        found = audit(args.adapter, method, **settings)
    if args.json:
        console.print_json(json.dumps(found.to_dict()))
    else:
        console.print(str(found))
    return 0 if found.conforms else 1
