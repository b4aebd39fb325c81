"""`fedspeed data list | fetch NAME | show NAME`: data sets, where they come from, and what a split looks like."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data import CARDS, DATASETS
from ..errors import UserError, unknown
from . import options
from .options import split_pairs
from .output import show_table
from .progress import Loading

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.splits import Summary

SPLITS_HELP = """\
splits:
  iid                  equal shares, class-balanced
  iid-random           equal shares of a random permutation, as the code released with the paper deals CIFAR-10
  dirichlet:A          a class prior Dir(A) per client, equal sizes, every sample used once (the paper's Dir-0.6)
  dirichlet-refill:A   as the code released with the paper: samples repeat, others stay unused
  dirichlet-class:A    every class shared out by Dir(A) over the clients, unequal sizes (as flwr-datasets)
  pathological:C       C classes per client
  shards:S             labels sorted, cut into S shards per client
  lognormal-size:S     unequal sizes, labels at random
  natural              the client ids that come with the data
"""
SHOW_EXAMPLES = """
examples:
  fedspeed data show cifar10 --split dirichlet:0.6 --clients 100
  fedspeed data show synthetic --set alpha=0.5 --set beta=0.5 --split natural --clients 30
  fedspeed data show shakespeare --split natural
  fedspeed data show images --data-dir pets --set size=32 --split dirichlet:0.3 --clients 20 --out pets-split
"""
FETCH_EXAMPLES = """\
examples:
  fedspeed data fetch cifar10
  fedspeed data fetch tinyimagenet --data-dir ~/Downloads/tiny-imagenet-200.zip     (checks and keeps your copy)

Files are kept in $FEDSPEED_CACHE, or the folder `fedspeed` of your cache folder (~/.cache).
"""
SETTING = ("split", "clients", "seed", "augment", "data_dir", "validation", "client_test")
"""Options of `show` that are arguments of `load`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions `list`, `fetch` and `show` with their options."""
    kinds = parser.add_subparsers(dest="action", metavar="list | fetch NAME | show NAME")
    look = parser.formatter_class
    kinds.add_parser("list", help="list names, sizes and sources of the data sets", formatter_class=look)
    about = "download a data set into the cache and verify it"
    fetch = kinds.add_parser("fetch", help=about, epilog=FETCH_EXAMPLES, formatter_class=look)
    about, below = "describe a split: numbers and figures", SPLITS_HELP + SHOW_EXAMPLES
    show = kinds.add_parser("show", help=about, epilog=below, formatter_class=look)
    for sub in (fetch, show):
        sub.add_argument("name", metavar="NAME", help="a data set; `fedspeed data list` names them")
        sub.add_argument("--data-dir", metavar="PATH", help="a copy you have: the published archive or its folder")
        about = "an option of the data set"
        sub.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", dest="sets", help=about)
    show.add_argument("--split", default="dirichlet:0.6", metavar="SPLIT", help="see below; default %(default)s")
    show.add_argument("--clients", type=int, metavar="N", help="default 100, or as many as the data have (natural)")
    show.add_argument("--seed", type=options.seed, default=0, metavar="N", help="fixes the split; default %(default)s")
    show.add_argument("--validation", default="", metavar="SPEC", help="0.1, clients:0.1 or clients:5; default none")
    show.add_argument("--client-test", default="", metavar="SPEC", help="0.2 of every client, or own; default none")
    about = "as in `run`; default paper, none for your own data"
    show.add_argument("--augment", default="", metavar="TEXT", help=about)
    show.add_argument("--out", metavar="DIR", help="where to write the figures (default: figures/)", default="figures")
    show.add_argument("--no-figures", action="store_true", help="numbers only")
    show.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")


def main(args: argparse.Namespace, console: Console) -> int:
    """Run the action."""
    if args.action is None:
        raise UserError("data: expected an action, found none: fedspeed data list | fetch NAME | show NAME")
    if args.action == "list":
        _list(console)
    elif args.name not in DATASETS:
        raise unknown("data set", args.name, DATASETS)
    else:
        {"fetch": _fetch, "show": _show}[args.action](args, console)
    return 0


def _list(console: Console) -> None:
    from rich.table import Column
    from rich.text import Text

    from ..data.fetch import cache_dir

    titles = [Column(title, no_wrap=True) for title in ("name", "train + test", "input", "classes", "here")]
    rows = []
    for name, card in CARDS.items():
        here = card.here or (cache_dir() / name / "about.json").exists()
        source = f"{card.source} ({card.licence})" if card.licence else card.source
        rows.append((name, card.size, card.shape, card.classes, "yes" if here else "", Text(source)))
    show_table(console, (*titles, "source"), rows, header_style="bold")
    console.out(f"\ncache: {cache_dir()}\nlook at one: fedspeed data show NAME --split dirichlet:0.6 --clients 100")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in split_pairs(args.sets, "--set", "OPTION=VALUE"):
        key = name.removeprefix("data.")
        if key in ("name", *SETTING, "progress"):
            raise UserError(f"--set {key}: not an option of the data set; see `fedspeed data show --help`")
        found[key] = value
    return found


def _fetch(args: argparse.Namespace, console: Console) -> None:
    from ..data import read
    from ..data.fetch import cache_dir, keep_own

    options = _options(args)
    with Loading(console) as shown:
        samples = read(args.name, data_dir=args.data_dir, progress=shown.on_progress, **options)
    whole = not CARDS[args.name].here and not options
    if args.data_dir is not None and whole:  # a published set, verified: later commands find it without --data-dir
        keep_own(args.name, samples, args.data_dir)
    test = 0 if samples.x_test is None else len(samples.x_test)
    console.out(f"{args.name}: {len(samples.x):,} training and {test:,} test samples of shape {samples.x.shape[1:]}")
    console.out(f"sha256 of the decoded data: {samples.digest()}")
    kept = cache_dir() / args.name
    if kept.exists() and (args.data_dir is None or whole):
        console.out(f"kept in {kept}")


def _show(args: argparse.Namespace, console: Console) -> None:
    from ..data import describe, load

    with Loading(console, show=not args.json) as shown:
        setting = {name: getattr(args, name) for name in SETTING}
        data = load(args.name, progress=shown.on_progress, **setting, **_options(args))
        summary = describe(data)
    if args.json:
        console.out(json.dumps(_plain(summary)))
    else:
        _print(summary, console)
    if args.no_figures or data.classes is None:
        return
    from ..report.figures import bubbles, heat_map

    stem = f"{args.name}-{data.split.replace(':', '-')}-{summary.clients}-{args.seed}"
    title = f"{args.name}, {data.split}, {summary.clients} clients"
    try:
        paths = [
            draw(summary.counts, Path(args.out) / f"{stem}-{kind}.png", title, data.class_names)
            for kind, draw in (("heat", heat_map), ("bubbles", bubbles))
        ]
    except OSError as error:
        raise UserError(f"data show: cannot write to {args.out} ({error.strerror})") from error
    if not args.json:
        console.out("figures       " + "\n              ".join(map(str, paths)))


def _print(s: Summary, console: Console) -> None:
    import numpy as np

    low, middle, high = np.percentile(s.sizes, [0, 50, 100], method="nearest").tolist()
    shares = s.counts.max(1) / s.sizes
    console.out(f"data          {s.name}: {s.samples:,} training samples, {s.test_samples:,} for testing")
    console.out(f"split         {s.split} over {s.clients} clients")
    if s.validation_samples:
        console.out(f"validation    {s.validation_samples:,} training samples, which no client trains on")
    if s.client_tests is not None:
        none = int((s.client_tests == 0).sum())
        console.out(
            f"client tests  {s.client_tests.sum():,} samples, of {s.clients - none} clients; {none} have no test part"
        )
    console.out(f"sizes         {low} to {high} samples per client, median {middle}")
    if s.classes > 1:
        console.out(
            f"classes       {s.half.mean():.1f} of {s.classes} hold half of a client's data (mean; from {s.half.min()} "
            f"to {s.half.max()}); the largest holds {shares.mean():.0%}"
        )
    console.out(f"augmentation  {s.augmentation}")
    console.out(f"repeats       {s.repeats:,} ({s.repeats / s.samples:.1%})")
    console.out(f"unused        {s.unused:,} ({s.unused / s.samples:.1%})")
    console.out(f"fingerprint   data {s.fingerprint}, split {s.split_fingerprint}")


def _plain(s: Summary) -> dict[str, Any]:
    tests = {} if s.client_tests is None else {"client_tests": s.client_tests.tolist()}
    return {
        "data": s.name, "split": s.split, "clients": s.clients, "classes": s.classes, "samples": s.samples,
        "test_samples": s.test_samples, "validation_samples": s.validation_samples, **tests,
        "sizes": s.sizes.tolist(), "half_mass": s.half.tolist(), "augmentation": s.augmentation,
        "repeats": s.repeats, "unused": s.unused,
        "data_fingerprint": s.fingerprint, "split_fingerprint": s.split_fingerprint,
    }  # fmt: skip
