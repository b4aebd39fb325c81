"""`fedspeed explain`, `verify`, `replay` and `inspect`: is a run healthy, are its bits right, what did it find."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..utils.registry import BACKENDS
from . import options
from .output import show_table

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.explain import Health
    from ..runs.replay import Replay

EPILOG_EXPLAIN = """\
Reads the rounds of a run, finished, failed or in progress, and reports signs of trouble: outputs that no longer depend
on the input, dead layers, a loss above that of guessing, accuracy at chance level, growing states, NaN.

examples:
  fedspeed explain runs/20260101-120000-fedspeed-digits-s0
"""
HEALTHY = (
    "nothing of what is looked for was seen: outputs depend on the input, no layer is dead, loss and accuracy are "
    "better than those of guessing or it is too early to say, no state grows, all numbers are finite"
)


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the run."""
    parser.add_argument("run", metavar="RUN", help="the run directory")
    options.allow_code(parser, executes=False)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main_explain(args: argparse.Namespace, console: Console) -> int:
    """Print the state of the run, then a paragraph per finding."""
    from ..report.explain import examine

    health = examine(Path(args.run))
    if args.json:
        console.print_json(json.dumps(_json_data(health)))
        return 0
    console.print(f"{health.path}: {health.state}; {_score(health)}")
    for note in health.notes:
        console.print(f"note: {note}", style="yellow")
    for text in _long(health, min(console.width, 110)):
        console.print(text)
    return 0


def _score(health: Health) -> str:
    scores = [(r.round, r.test_accuracy) for r in health.records if r.test_accuracy is not None]
    if not health.records:
        return "no round is done yet"
    if not scores:
        loss = health.records[-1].train_loss
        return "train loss not finite" if loss is None else f"train loss {loss:.4g}"
    best = max(scores, key=lambda score: score[1])
    return f"accuracy {scores[-1][1]:.2%} in round {scores[-1][0]}, best {best[1]:.2%} in round {best[0]}"


def _long(health: Health, wide: int) -> list[str]:
    from ..report.explain import series
    from ..runs.diagnosis import MEANING
    from ..runs.directory import RunDir

    if not health.found and not health.records:
        return ["there is nothing to look at yet"]
    if not health.found:
        return [textwrap.fill(HEALTHY, wide)]
    parts = []
    for one in health.found:
        numbers = [f"seen in {len(one.values)} rounds; round: value {series(one)}"] if one.values else []
        texts = [f"since round {one.since}: {one.seen}", *numbers, MEANING[one.name]]
        body = [textwrap.fill(text, wide, initial_indent="  ", subsequent_indent="  ") for text in texts]
        tries = [f"    {i}. {advice.option}   ({advice.why})" for i, advice in enumerate(health.advice(one), 1)]
        parts.append("\n".join(["", one.title, *body, *(["  what to try, in this order:", *tries] if tries else [])]))
    first = next((advice for one in health.found for advice in health.advice(one)), None)
    if first is None:
        return parts
    model = health.config.get("model")
    if health.config.get("data") and (model.get("name") if isinstance(model, dict) else model) != "given":
        again = ["fedspeed", "run", str(RunDir(health.path).config_file), *first.option.split(), "--out"]
        parts.append(f"\nfor example: {shlex.join([*again, f'{health.path}-2'])}")
    else:
        parts.append(
            "\nthe run is of objects given to `simulate`: write --lr 0.02 as lr=0.02, and set method.x on the method"
        )
    return parts


def _json_data(health: Health) -> dict[str, object]:
    from ..runs.diagnosis import MEANING

    return {
        "run": str(health.path),
        "state": health.state,
        "rounds": len(health.records),
        "notes": health.notes,
        "illnesses": [
            {**asdict(one), "means": MEANING[one.name], "try": [advice.option for advice in health.advice(one)]}
            for one in health.found
        ],
    }


EPILOG_VERIFY = """\
Recomputes the digests of all checkpoint files, the server's running sums from the clients' states, and the last round
from the checkpoint before it (--all: every round), and compares bits. The run directory is only read.
Exit code: 0 if all holds, 1 if something does not, 2 for bad input.

examples:
  fedspeed verify runs/NAME
  fedspeed verify runs/NAME --all --backend serial
"""


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Add the run and how much of it is checked."""
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--all", action="store_true", help="repeat every round, from round 0")
    parser.add_argument("--backend", metavar="|".join(BACKENDS), default="", help="back end; default the run's")
    options.allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main_verify(args: argparse.Namespace, console: Console) -> int:
    """Print what holds, what does not, and on which machine it was checked."""
    from ..runs.verify import verify

    with console.status(f"verifying {args.run}"):
        found = verify(Path(args.run), every_round=args.all, backend=args.backend, allow_code=args.allow_code)
    if args.json:
        console.print_json(json.dumps(asdict(found)))
        return 1 if found.broken else 0
    for text in found.held:
        console.print(f"holds:  {text}")
    for text in found.broken:
        console.print(f"BROKEN: {text}")
    console.print("checked on: " + ", ".join(f"{key} {value}" for key, value in found.checked_on.items()))
    if found.differs is None:
        console.print("the run did not say where it was made (it has no summary.json)")
    for key, (then, now) in (found.differs or {}).items():
        console.print(f"not the run's own {key}: {then} then, {now} now; bits are promised for equal ones only")
    console.print(f"{args.run}: " + (f"{len(found.broken)} BROKEN" if found.broken else "all holds"))
    return 1 if found.broken else 0


EPILOG_REPLAY = """\
Repeats the rounds since the nearest checkpoint (or from round 0), then this client's turn with the run's own
arithmetic, and compares its upload with the digest that the run stored. The run directory is only read. T may be at
most one more than the rounds that RUN has: the round in which it diverged, for example.
Exit code: 0 if the upload is the same or has no stored digest, 1 if it differs or the client failed, 2 for bad input.

examples:
  fedspeed replay runs/NAME --round 417 --client 12
  fedspeed replay runs/NAME --round 417 --client 12 --json
"""

SHOWN = 12
"""Number of steps that are printed at each end of a long turn."""


def configure_replay(parser: argparse.ArgumentParser) -> None:
    """Add the turn, the back end and the format."""
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--round", type=int, required=True, metavar="T", help="the round; 1 is the first")
    parser.add_argument("--client", type=int, required=True, metavar="I", help="a client of the round's cohort")
    about = "back end of the rounds before it; default the run's"
    parser.add_argument("--backend", metavar="|".join(BACKENDS), default="", help=about)
    options.allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main_replay(args: argparse.Namespace, console: Console) -> int:
    """Print the client's steps, and whether its upload is the one that the run counted."""
    from ..runs.replay import replay
    from .progress import Live

    with Live(console, args.round, "replay", show=not args.json) as live:
        how: dict[str, Any] = {"backend": args.backend, "allow_code": args.allow_code, "progress": live.on_progress}
        found = replay(Path(args.run), args.round, args.client, **how)
    if args.json:
        console.print_json(json.dumps(found.to_dict()))
    else:
        _print_replay(console, found)
    return int(bool(found.error) or found.matches is False or bool(found.unlike))


def _print_replay(console: Console, found: Replay) -> None:
    beside = f", in a block with {', '.join(map(str, found.beside))}" if found.beside else ""
    samples = "" if found.labels is None else f"; samples of each class: {' '.join(map(str, found.labels))}"
    began = f"the checkpoint of round {found.began}" if found.began else "round 0"
    console.print(f"{found.run}: round {found.round}, client {found.client}, from {began}{beside}")
    console.print(f"{len(found.steps)} steps at rate {found.lr:.4g}, engine {found.engine}{samples}")
    rows: list[tuple[str, ...]] = []
    for k, step in enumerate(found.steps, 1):
        some = " ".join(map(str, step.samples[:6])) + (" ..." if len(step.samples) > 6 else "")
        loss = "-" if step.loss is None else f"{step.loss:.4g}"
        rows.append((str(k), loss, " ".join(f"{g:.4g}" for g in step.gradients), f"{step.direction:.4g}", some))
    if len(rows) > 2 * SHOWN:
        rows[SHOWN:-SHOWN] = [("...",)]
    show_table(console, ("step", "loss", "||gradient||", "||direction||", "samples"), rows)
    for text in found.unlike[:3]:
        console.print(f"on the way: {text}")
    if found.error:
        console.print(found.error)
    elif found.matches is None:
        console.print(f"upload {found.digest}: nothing to compare with, the run noted no digest of it")
    elif found.matches:
        console.print(f"upload {found.digest}, as the run noted it: the same bits")
    else:
        console.print(f"upload {found.digest}, the run noted {found.recorded}: NOT the same")


EPILOG_INSPECT = """\
eigenvalue: the largest of the training loss's Hessian; SAM gap: what one ascent step of length rho adds to the loss;
dissimilarity: mean_i ||grad F_i - grad F||^2; divergence: mean_i ||x_iK - mean||^2 after a round of plain local SGD.
Each run directory gets an inspect.json.

--noise measures instead how much of an ascent step (SAM, FedSpeed) is noise of its minibatch, at the server's model.
cosine: of the gradients of two independent minibatches; noise: 1 - ||E g||^2 / E ||g||^2, unbiased; of minibatches of
one client, then of all clients' samples together. The run may be in progress: its newest checkpoint is read, or that of
--round (`keep_every` keeps more than the last two). noise.json gets an entry per round.

examples:
  fedspeed inspect runs/fedavg runs/fedspeed
  fedspeed inspect runs/NAME --samples 5000 --rho 0.05 --json
  fedspeed inspect runs/NAME --noise --pairs 8
"""


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the sizes of the samples."""
    about = "directories of finished runs; with --noise also unfinished ones"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=about)
    parser.add_argument("--samples", type=int, metavar="N", help="training samples; default 1000")
    parser.add_argument("--clients", type=int, default=20, metavar="N", help="number of clients; default 20")
    parser.add_argument("--rho", type=float, metavar="X", help="length of the SAM step; default 0.1")
    parser.add_argument("--iterations", type=int, metavar="N", help="Hessian products; default 100")
    group = parser.add_argument_group("noise of the ascent step")
    group.add_argument("--noise", action="store_true", help="measure the noise of the ascent step, nothing else")
    group.add_argument("--pairs", type=int, metavar="N", help="pairs of minibatches per client; default 8")
    group.add_argument("--round", type=int, metavar="N", help="the model after N rounds; default: the last there is")
    group.add_argument("--seed", type=options.seed, metavar="N", help="of clients and minibatches; default 0")
    parser.add_argument("--out", metavar="DIR", help="write the JSON file there instead (one run only)")
    options.allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def main_inspect(args: argparse.Namespace, console: Console) -> int:
    """Print one row per run."""
    if args.out and len(args.runs) > 1:
        raise UserError(f"inspect: --out takes one run, got {len(args.runs)}; omit --out, or inspect one by one")
    for name in ("samples", "rho", "iterations") if args.noise else ("pairs", "round", "seed"):
        if getattr(args, name) is not None:
            if args.noise:
                raise UserError(f"inspect: --{name} expects no --noise beside it, found it; omit one of them")
            raise UserError(f"inspect: --{name} expects --noise, found none; add it, or omit --{name}")
    how = {"clients": args.clients, "out": Path(args.out) if args.out else None, "allow_code": args.allow_code}
    (_noise if args.noise else _sharpness)(args, console, how)
    return 0


def _noise(args: argparse.Namespace, console: Console, how: dict[str, Any]) -> None:
    """Print the noise of the ascent step of each run."""
    from ..runs.inspect import inspect_noise, plain

    how |= {"round": args.round, "pairs": 8 if args.pairs is None else args.pairs, "seed": args.seed or 0}
    rows, found = [], {}
    for run in args.runs:
        with console.status(f"inspecting {run}"):
            one = inspect_noise(Path(run), **how)
        found[run] = plain(one)
        for what, noise in (("one client", one.client), ("all clients", one.whole)):
            rows.append((
                Path(run).name, one.method, str(one.round), what, f"{noise.cosine:.3f} ± {noise.error:.3f}",
                f"{noise.share:.1%}", f"{noise.norm:.3g}", f"{noise.full_norm:.3g}", str(noise.pairs),
            ))  # fmt: skip
    if args.json:
        console.print_json(json.dumps(found))
        return
    titles = ("run", "method", "round", "minibatches of", "cosine", "noise", "||g||", "||full g||", "pairs")
    show_table(console, titles, rows)
    batch, clients, seed = (_of_all(found, name) for name in ("batch_size", "clients", "seed"))
    console.print(f"minibatches of {batch}, {clients} clients, seed {seed}; noise.json written")
    for run, measured in found.items():
        if measured["samples"] <= measured["batch_size"] and measured["client"]["share"] < 1e-4:
            console.print(
                f"{Path(run).name}: these clients have at most {measured['samples']} samples, so a minibatch of "
                f"{measured['batch_size']} is all that a client has: the row `one client` does not measure noise"
            )


def _sharpness(args: argparse.Namespace, console: Console, how: dict[str, Any]) -> None:
    """Print sharpness and divergence of each run."""
    from ..runs.inspect import inspect_run

    given = {name: getattr(args, name) for name in ("samples", "rho", "iterations")}
    how |= {name: value for name, value in given.items() if value is not None}
    rows, found, warm = [], {}, []
    for run in args.runs:
        with console.status(f"inspecting {run}"):
            one = inspect_run(Path(run), **how)
        found[run] = asdict(one)
        warm += [f"{Path(run).name}: warm-up {one.warmup}"] if one.warmup else []
        rows.append((
            Path(run).name, one.method, f"{one.loss:.4f}", f"{one.gradient_norm:.3g}",
            f"{one.eigenvalue:.4g} ± {one.residual:.1g}", f"{one.sam_gap:.4g}", f"{one.dissimilarity:.4g}",
            f"{one.divergence:.4g}",
        ))  # fmt: skip
    if args.json:
        console.print_json(json.dumps(found))
        return
    titles = ("run", "method", "loss", "||grad||", "eigenvalue", "SAM gap", "dissimilarity", "divergence")
    show_table(console, titles, rows)
    for line in warm:
        console.print(line)
    samples, clients = (_of_all(found, name) for name in ("samples", "clients"))
    console.print(f"over {samples} training samples, {clients} clients; rho {one.rho:g}; inspect.json written")


def _of_all(found: dict[str, dict[str, Any]], name: str) -> str:
    """Return the values that a setting has in the measurements, `20 or 50`."""
    return " or ".join(dict.fromkeys(str(one[name]) for one in found.values()))
