"""Between the page's JavaScript and `federation`: JSON in, JSON out."""

from __future__ import annotations

import math

from browser import document, window
from federation import Federation, Quadratic, Vec, cohort, optimum, warned
from javascript import JSON

from fedspeed.errors import UserError

run = None  # the one that is shown
active = 0  # clients in a round of it
best = [0.0, 0.0]


def start(text):
    """Start a run; return the optimum, minus the clients' gradients there, and the method's warning."""
    global run, active, best
    asked = JSON.parse(text)
    clients = [Quadratic(tuple(c["optimum"]), c["a"], c["b"], c["c"]) for c in asked["clients"]]
    run, active, best = None, asked["active"], optimum(clients)
    reply = {"optimum": best, "pulls": [(-client.gradient(Vec(best))).a for client in clients], "error": ""}
    module = __import__(asked["module"], fromlist=["methods"])
    try:
        method = getattr(module, asked["cls"])(**asked["fields"])
        reply["error"] = warned(method, asked["lr"], active, len(clients))
        run = Federation(method, clients, asked["x0"], asked["K"], asked["lr"])
    except UserError as error:
        reply["error"] = str(error)
    return written(reply)


def step():
    """Run one round; return null if there is no run, or if its model has diverged."""
    if run is None or run.lost:
        return "null"
    happened = run.round(cohort(0, run.t, len(run.clients), active))
    x = run.x
    if run.lost:
        return "null"
    gap = sum(client.value(Vec(x)) - client.value(Vec(best)) for client in run.clients) / len(run.clients)
    far = math.hypot(x[0] - best[0], x[1] - best[1])
    known = {str(i): dual for i, dual in run.duals().items()}
    paths = {str(i): path for i, path in happened.paths.items()}
    return written({"t": run.t, "x": x, "distance": far, "gap": gap, "paths": paths, "duals": known})


def written(value):
    """Return JSON with every digit of every number."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {written(entry)}' for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(entry) for entry in value) + "]"
    if isinstance(value, str):
        return JSON.stringify(value)
    return repr(value) if math.isfinite(value) else "null"


window.python = {"start": start, "step": step}
document.dispatchEvent(window.Event.new("python"))
