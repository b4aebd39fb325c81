"""The agreement between server and devices: method, model, plan, loss, versions. The server compares the statements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..client.flat_model import Loss, flat_model
from ..client.hooks import overrides
from ..client.losses import fitting_loss, loss_name
from ..client.work import Work
from ..config.plan import PLACEMENT, Plan
from ..config.spec import SETTINGS, Spec, with_texts
from ..config.stopping import RULES
from ..data.federated import Federated
from ..errors import UserError
from ..methods import DP
from ..methods.base import Method, nested
from ..models.resnet import resolve_layers
from ..runs.simulate import as_model, as_plan, module_digest
from ..utils.devices import pick_device
from ..utils.processes import environment
from .messages import cut

LOOSE = (*PLACEMENT, *RULES, "rounds", "eval_every", "client_metrics", "on_client_error", "engine", "layers")
"""Fields of a plan in which server and devices may differ, because no bit of a turn depends on them."""
SHAPE = ("shape", "inputs", "targets", "classes")
SAME = ("fedspeed", "torch", "method", "plan", "loss", "no_decay", *SHAPE, "model")
"""Statements in which a device must equal the server."""
ALIKE = ("numpy", "cpu", "vendor", "device", "variables", "layers")
"""Statements that can change the last bits; a device that differs may take part, and the log names it."""


@dataclass(frozen=True)
class Agreement:
    """The settings of a run as an app's file gives them, before any data are read."""

    method: Method
    model: Any
    plan: Plan
    loss: Loss | None
    no_decay: tuple[str, ...]

    def configured(self, config: Mapping[str, Any]) -> Agreement:
        """Return a copy with the fields of a plan in Flower's run config; raise for a run that devices cannot do."""
        fields = Plan().fields()
        named = {key.replace("-", "_"): value for key, value in config.items()}
        plan = as_plan(self.plan, {key: value for key, value in named.items() if key in fields})
        label = self.method.label
        if overrides(self.method, "settle"):
            raise UserError(
                f"flower: {label} changes states once the mean is known (settle), when they are on the "
                f"devices; take another method"
            )
        if any(isinstance(inside, DP) for inside in nested(self.method)):
            raise UserError(
                f"flower: {label}: expected a method without dp, found it: its noise is a function of the "
                f"seed, which every device has and can subtract; leave out +dp"
            )
        if self.method.needs.get("on_client_error") == "stop":
            raise UserError(f"flower: {label} needs every reply, and a device may be lost; take another method")
        if plan.engine == "block":
            raise UserError("flower: engine must be loop, found block; a device runs one client")
        if "," in plan.client_metrics:
            raise UserError(
                f"flower: client_metrics must be every=N, found {plan.client_metrics}; leave out what follows"
            )
        return replace(self, plan=replace(plan, engine="loop", backend="auto", on_client_error="drop"))

    def module(self, data: Federated) -> nn.Module:
        """Return the model; a name or a class is built from the seed."""
        return as_model(self.model, data, self.plan.seed)

    def work(self, data: Federated, module: nn.Module) -> Work:
        """Return the local work on these data, made as `Simulation` makes it."""
        plan = replace(self.plan, active=self.plan.cohort_size(data.clients))
        device = pick_device(plan.device)
        flat = flat_model(module, data, plan, device, self.no_decay, self.method)
        return Work(self.method, flat, fitting_loss(self.loss, data), data.to(device, flat.dtype), plan)

    def statements(self, data: Federated, module: nn.Module) -> dict[str, str]:
        """Return the statements of this side by name, for the comparison of server and device."""
        plan = {key: value for key, value in with_texts(self.plan.fields()).items() if key not in LOOSE}
        files = {key: spec for key in SETTINGS if isinstance(spec := getattr(self.plan, key), Spec)}
        plan |= {key: f"{plan[key]} {spec.code}" for key, spec in files.items()}  # the place may differ, the code not
        plan["active"] = self.plan.cohort_size(data.clients)
        about = environment(pick_device(self.plan.device)) | {"layers": resolve_layers(module, self.plan.layers)}
        return {
            **{name: str(about[name]) for name in ("fedspeed", "torch", *ALIKE)},
            "method": json.dumps(_stated(self.method), sort_keys=True),
            "plan": json.dumps(plan, sort_keys=True),
            "loss": loss_name(fitting_loss(self.loss, data)),
            "no_decay": ", ".join(self.no_decay),
            "model": module_digest(module),
            "shape": json.dumps(list(data.shape)),
            "inputs": str(data.x.dtype).removeprefix("torch."),
            "targets": str(data.y.dtype).removeprefix("torch."),
            "classes": str(data.classes),
        }


def _stated(method: Method) -> dict[str, Any]:
    """Return a method's name, fields and digest of its code; the path of its file may differ between machines."""
    fields = {k: _stated(v) if isinstance(v, Method) else repr(v) for k, v in method.fields().items()}
    return {"name": method.label, "code": method.code, **fields}


def differs(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return the first required statement in which a device differs, in words, or "" if there is none.

    Example:
        >>> ours = dict.fromkeys(SAME, "1")
        >>> differs(ours, ours | {"torch": "2"})
        'expected torch 1, found 2'
    """
    for name in SAME:
        if found.get(name) != expected[name]:
            then, now = (cut(text) for text in (expected[name], found.get(name, "nothing")))
            return f"expected {name} {then}, found {now}"
    return ""
