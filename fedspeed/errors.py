"""Errors that a user can correct, and their messages: the CLI prints them as one line and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input; the message says what was expected, what was found and how to fix it."""


class ClientFailed(UserError):
    """One client's local work raised; the message names method, round, client and step."""


class Diverged(RuntimeError):
    """NaN or Inf of a client or the server; nothing of that round was kept."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


SYNONYMS = {
    "lr": "learning_rate local_lr step_size eta eta_l",
    "lr_decay": "decay gamma",
    "lr_schedule": "schedule scheduler lr_scheduler learning_rate_schedule cosine step_decay milestones",
    "warmup": "warm_up warmup_rounds lr_warmup warmup_epochs warmup_steps",
    "local_epochs": "epochs num_epochs E local_ep local_epoch",
    "local_steps": "K steps num_steps iterations local_iterations",
    "batch_size": "batch B bs",
    "rounds": "T num_rounds n_rounds communication_rounds iters",
    "clients": "num_clients n_clients users num_users m N",
    "active": "participation sample_clients clients_per_round fraction_fit cohort_size S C",
    "weight_decay": "wd l2",
    "local_optimizer": "optimizer optimiser optim client_optimizer local_optimiser local_opt momentum nesterov",
    "loss": "criterion objective loss_fn loss_function",
    "clip": "grad_clip clip_norm max_norm",
    "method": "algorithm algo strategy",
    "model": "net network arch architecture",
    "data": "dataset",
    "split": "partition partitioner heterogeneity alpha",
    "polynomial": "linear poly",
    "fixed": "uniform random",
    "huber": "mae l1 smooth_l1 smooth-l1",
    "mse": "l2 squared",
    "dirichlet": "noniid non-iid non_iid niid lda hetero",
    "resnet18_gn": "resnet resnet18 resnet-18 resnet_18",
    "seed": "random_seed rng",
    "workers": "num_workers jobs processes num_processes",
    "device": "gpu cuda",
    "eval_every": "eval_interval test_every evaluate_every",
    "stop_at": "target_accuracy stop_when",
    "patience": "early_stopping early_stop",
    "max_time": "time_limit time_budget timeout walltime max_seconds",
    "out": "output output_dir out_dir save_dir folder",
    "log": "wandb tensorboard mlflow logger tracker",
    "run": "train fit simulate start launch",
    "runs": "list ls history jobs",
    "report": "plot plots figure table",
    "explain": "diagnose debug why",
    "show": "status summary info",
}
"""Our options, keys, values and commands, with the names that other programs have for them."""
SHOWN = 12
"""How many known names a message lists in full; of more, the closest half."""
_MEANT = {theirs: ours for ours, names in SYNONYMS.items() for theirs in names.split()}


def nearest(found: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant: our word for another program's, else one spelled alike.

    Example:
        >>> nearest("learning_rate", ["lr", "lr_decay"]), nearest("SCAFOLD", ["scaffold"]), nearest("x", ["lr"])
        ('lr', 'scaffold', None)
    """
    names = {name.casefold(): name for name in known if name != found}
    meant = _MEANT.get(found) or _MEANT.get(found.casefold())
    if meant in names:
        return meant
    near = difflib.get_close_matches(found.casefold(), names, n=1)
    return names[near[0]] if near else None


def one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message.

    Example:
        >>> one_line(ValueError("no\\nand why"))
        'ValueError: no'
    """
    try:
        first = (str(error).splitlines() or [""])[0]
    except Exception:  # a user's exception class may fail to print
        first = ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def unknown(kind: str, found: str, known: Iterable[str]) -> UserError:
    """Return an error for a name that does not exist, with the nearest one that does.

    Example:
        >>> print(unknown("method", "fedsped", ["fedavg", "fedspeed"]))
        unknown method 'fedsped'; did you mean 'fedspeed'? Known: fedavg, fedspeed
    """
    names = sorted(known)
    near = nearest(str(found), names)
    hint = f"did you mean {near!r}? " if near else ""
    if near and len(names) > SHOWN:
        close = difflib.get_close_matches(str(found).casefold(), names, n=SHOWN // 2, cutoff=0.5)
        names = [*sorted({near, *close}), f"... ({len(names)} names)"]
    return UserError(f"unknown {kind} {found!r}; {hint}Known: {', '.join(names) or 'none'}")
