"""The `fedspeed` command line, the only place that prints.

The module of a command has `configure(parser)`, which adds its options, `main(args, console)`, which returns the exit
code, and an `EPILOG` with examples; `GROUPS` below lists it, and `MODULES` names the functions of commands that share a
module. Only the module of the chosen command is imported, and torch only when a command needs it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import Diverged, Terminated, UserError, nearest, one_line
from ..utils.collector import paused, skip_at_exit
from .output import outlets, terminable, visible

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = ("torch", "numpy", "safetensors", "matplotlib", "PIL", "rich", "tomli_w")
"""The modules of the packages in `dependencies` of pyproject.toml."""
ABOUT = "Simulate federated optimisation: FedSpeed (ICLR 2023), its baselines and its successors."
GROUPS = {
    "run": {
        "run": "train one method and write a run directory",
        "resume": "continue a run that was stopped, with the same bits",
        "extend": "give a run more rounds, as if it had had them from the start",
        "fork": "start a run that shares another run's first rounds, bit for bit, then changes settings",
        "methods": "list the methods, or describe one",
        "models": "list the models",
        "data": "list, fetch or inspect data sets and splits",
    },
    "compare": {
        "compare": "train several methods over several seeds and print one table",
        "sweep": "run one config with many values of its fields; print one table and the best point",
        "tune": "tune methods with equal budgets on held-out data, then judge them with fresh seeds",
        "report": "write one page about runs: ranking, differences, significance; or tables and figures",
        "export": "export runs to TensorBoard, Weights & Biases, MLflow, CSV or Parquet",
    },
    "look": {
        "runs": "list runs: method, data, rounds, score, what became of them",
        "show": "print the summary and the curve of a run, finished or in progress",
        "watch": "follow runs in progress, on a page or in the terminal",
        "explain": "diagnose a run: what is wrong, the likely cause, what to try",
        "diff": "list what differs between two runs",
        "verify": "check a run: digests, running sums, and rounds repeated bit for bit",
        "replay": "repeat one client's turn, step by step, and compare its upload with the run's",
        "inspect": "measure sharpness, client divergence and noise of ascent steps",
    },
    "paper": {
        "reproduce": "make the paper's tables and figures, with its numbers beside ours and a verdict",
        "theory": "check the conditions of the convergence theorem, measure its rate",
        "audit": "run your implementation of a method beside ours, and name the first difference",
    },
    "scale": {
        "slurm": "write or submit a Slurm job of runs: an array over seeds and points, optionally on Ray",
        "deploy": "write or check an app that runs a method on real devices over Flower",
    },
}
"""Group -> command -> help, in the order of `fedspeed --help`."""
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
MODULES = {
    "resume": "run:resume",
    "extend": "run:resume",
    "fork": "run:fork",
    "models": "methods:models",
    "export": "report:export",
    "slurm": "scale:slurm",
    "deploy": "scale:deploy",
    **{name: f"look:{name}" for name in ("runs", "show", "watch", "diff")},
    **{name: f"check:{name}" for name in ("explain", "verify", "replay", "inspect")},
}
"""Commands in the module of another: its name, and the end of the names of their functions (`configure_fork`)."""

_SPLIT = "--split dirichlet:0.3 for skewed labels, --split iid for none"
_ANSWERS = {
    "optimizer optim": "--local-optimizer adam for the clients' steps, --method NAME for the algorithm",
    "gpus num_gpus": "--device cuda computes on a GPU, --ray-gpus 0.5 gives each Ray worker a share of one",
    "wandb tensorboard mlflow": "--log wandb, tensorboard, mlflow or csv sends every round to a tracker",
    "noniid non_iid iid dirichlet": _SPLIT,
    "alpha": f"{_SPLIT}; a field alpha of the method: --set alpha=VALUE",
    "sampler client_sampling client_selection": (
        "--cohort cyclic, weighted:samples, availability:FILE or file.py:NAME chooses who takes part"
    ),
    "frac join_ratio fraction": "--active is the number of clients in a round, not a share",
    "server_lr": "the server's rate is a field of the method: --set eta_g=VALUE",
    "lr_step": "--lr-schedule step:30,60:0.1",
    "aggregator": "the server sees the mean of the replies alone; --weighting samples weights it",
    "defense": "the server sees the mean of the replies alone, so medians and Krum are not possible",
    "config": "a config file needs no option: fedspeed run FILE.toml",
    "name": "--out runs/NAME names the run's directory",
    "dry_run": "--rounds 1 tries a setting; `fedspeed tune --dry-run` prices a search",
    "parallel": "--workers N trains clients side by side, `fedspeed compare --jobs N` runs",
    "fine_tune personalize personalise finetune": (
        "--client-metrics every=10,personalised=5 scores models after five local steps of each client"
    ),
    "async asynchronous": "rounds are synchronous; --stragglers and --network simulate slow clients",
    "seeds": "a run has one --seed; `fedspeed compare METHOD --seeds 3` runs several",
    "checkpoint": "every run has checkpoints: `fedspeed resume RUN`; --checkpoint-every N, --keep-every N",
    "save_model": "every run keeps its model in its directory",
    "fp16 amp": "--precision bfloat16",
    "verbose": "progress is shown unless --quiet; --traceback shows where an error is",
    "val_split": "--validation 0.1 sets data aside to choose rounds on",
}
ANSWERS = {option: answer for options, answer in _ANSWERS.items() for option in options.split()}
"""Options that other programs have and no option here is spelled like, and what to use instead."""

EPILOG = """\
examples:
  fedspeed run --method fedspeed --data digits --split dirichlet:0.3 --clients 50 --active 5
  fedspeed compare fedavg fedspeed --data digits --clients 50 --active 5 --seeds 3
  fedspeed methods fedspeed
  fedspeed COMMAND --help
"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps examples as written and leaves room for option names."""

    def __init__(self, prog: str) -> None:
        width = min(110, shutil.get_terminal_size().columns if tty() else 100)
        super().__init__(prog, max_help_position=34, width=width)


def tty() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and name the next step.

    Options are written in full: `--seed 3` must not mean `--seeds 3` where a command has no `--seed`.
    """

    default_action = ""  # of a command with actions: the one that is used if none is given

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **how})

    def error(self, message: str) -> None:  # type: ignore[override]
        hint = self._hint(message)
        short = message.partition(" (choose from")[0] if hint else message
        raise UserError(f"{short}; {hint}see `{self.prog} --help`")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an unknown option is an error of the command it was given to, which can suggest its own options."""
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            self._chosen(found).error(f"unrecognized arguments: {' '.join(extra)}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an action may follow its options, and options without an action belong to the default action."""
        if self.default_action and (not args or (args[0][0:1] == "-" and args[0] not in ("-h", "--help"))):
            inner = self.inner()
            values = {flag for one in inner.values() for flag, a in one._option_string_actions.items() if a.nargs != 0}
            places = [i for i, word in enumerate(args) if word in inner and args[i - 1] not in values]
            at = places[0] if places else len(args)
            args = [*(args[at : at + 1] or [self.default_action]), *args[:at], *args[at + 1 :]]
        return super().parse_known_args(args, namespace)

    def inner(self) -> dict[str, Parser]:
        """Return the parsers of the commands, or of a command's actions, by name."""
        found = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next(found, {})

    def _chosen(self, found: argparse.Namespace) -> Parser:
        """Return the parser of the given command, or itself if there is none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and getattr(found, action.dest, None) in action.choices:
                return self.inner()[getattr(found, action.dest)]._chosen(found)
        return self

    def _hint(self, message: str) -> str:
        """Suggest a command, an action or an option in place of one that does not exist."""
        _, wrong, word = message.partition(": invalid choice: ")
        if wrong:
            near = nearest(word.split("'")[1], self.inner())
            return f"did you mean {near!r}? " if near else "expected one that its help lists; "
        option = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            return ""
        from ..methods import METHODS  # imported late, because it imports every method
        from ..methods.local_optimizers import OPTIMIZERS, optimizer_text

        known = {flag.removeprefix("--").replace("-", "_") for flag in self._option_string_actions if flag[:2] == "--"}
        if name in known:
            return f"did you mean --{name.replace('_', '-')}? "
        if "method" in known and name in ANSWERS:
            return f"{ANSWERS[name]}; "
        if "set" in known and any(name in vars(cls()) for cls in METHODS.values()):
            return f"it is a field of a method: --set {name}=VALUE; "
        if "local_optimizer" in known and name in OPTIMIZERS:
            return f"it is a local optimiser: --local-optimizer {optimizer_text(name)}; "
        near = nearest(name, known)
        return f"did you mean --{near.replace('_', '-')}? " if near else ""


def build_parser(only: str | None = None) -> Parser:
    """Return the parser of all commands.

    Args:
        only: the one command that gets its options and whose module is imported, "" for none; None for all commands.
    """
    lines = []
    for group, listed in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<10} {about}" for name, about in listed.items())]
    parser = Parser(
        prog="fedspeed",
        usage="fedspeed [-h] [--version] COMMAND ...",
        description="\n".join([ABOUT, *lines]),
        epilog=EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"fedspeed {__version__}")
    commands = parser.add_subparsers(dest="command", prog="fedspeed", help=argparse.SUPPRESS, parser_class=Parser)
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, description=f"{about[0].upper()}{about[1:]}.", formatter_class=Help)
        if only is None or name == only:
            _configure(sub, name)
    return parser


def _configure(sub: Parser, name: str) -> None:
    """Give a command's parser its options, and its actions theirs."""
    place, _, end = MODULES.get(name, name).partition(":")
    with paused():
        module = import_module(f".{place}", __name__)
    getattr(module, f"configure_{end}" if end else "configure")(sub)
    sub.epilog = getattr(module, f"EPILOG_{name.upper()}" if end else "EPILOG", None)
    sub.default_action = getattr(module, "DEFAULT_ACTION", "")
    for each in (sub, *sub.inner().values()):
        each.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    sub.set_defaults(main=getattr(module, f"main_{end}" if end else "main"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 done, 1 diverged, 2 bad input, 3 a defect of fedspeed, 130 Ctrl-C, 143 SIGTERM. A closed pipe (`| head -1`) does
    not stop a command; output that cannot be written is reported as an error at the end.
    """
    skip_at_exit()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks how to complete a word
        _complete()
    with outlets() as out:
        with terminable() as terminated:
            try:
                code = _main(argv)
            except SystemExit:  # --help, --version
                out.flush()
                if not out.error:
                    raise
                code = 0
        out.flush()
        if out.error and not code:
            lost = f"standard output cannot be written ({out.error.strerror}), so its text is lost"
            code = _failed(f"error: {lost}; all files are complete; send the output elsewhere", argv, 2)
        return 143 if terminated and code == 130 else code


def _complete() -> None:
    """Print completions of the command line in the variables that argcomplete's shell function sets, and exit."""
    import argcomplete  # of the extra `completion`; the shell asks only where it is installed

    words = os.environ.get("COMP_LINE", "").split()[1:]
    parser = build_parser(next((word for word in words if not word.startswith("-")), ""))
    for action in (action for one in (parser, *parser.inner().values()) for action in one._actions):
        if action.dest in ("method", "methods"):
            from ..methods import METHODS  # imported late; the command's module has imported it

            action.completer = lambda **_: list(METHODS)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _main(argv: Sequence[str] | None) -> int:
    """Run a command; turn every error into one line and an exit code."""
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        if words[:1] == ["help"]:
            words = [*words[1:2], "--help"]
        elif words == ["version"]:
            words = ["--version"]
        parser = build_parser(next((word for word in words if not word.startswith("-")), ""))
        args = parser.parse_args(words)
        args.argv = words
        if not args.command:
            parser.print_help()
            return 0
        console = _console()
        with warnings.catch_warnings():
            warnings.showwarning = _each_once()
            try:
                code: int = args.main(args, console)
                return code
            except SystemExit as stopped:  # from an observer, for example; it must not look like success
                raise KeyboardInterrupt(f"user code called sys.exit({stopped.code!r})") from stopped
            finally:
                with suppress(OSError):  # remove output folders that stayed empty
                    for folder in getattr(args, "made", ()):
                        folder.rmdir()
    except UserError as error:
        return _failed(f"error: {error}", argv, 2)
    except Diverged as error:
        return _failed(str(error), argv, 1)
    except KeyboardInterrupt as stopped:
        how = "terminated" if isinstance(stopped, Terminated) else "interrupted"
        then = str(stopped) or "`fedspeed resume RUN` continues it"
        sys.stderr.write(f"fedspeed: {how}; what was done is kept, {then}\n")
        return 130
    except OSError as error:
        return _failed(f"error: {error}; check that the place exists, can be written and has room", argv, 2)
    except MemoryError as error:
        return _failed(f"error: not enough memory ({error or 'no more said'}); use smaller sizes", argv, 2)
    except Exception as error:
        return _failed(f"error: {_unexpected(error)}", argv, 3)


def _console() -> Console:
    """Return a console that prints control characters, for example those in a run directory, as text."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(visible(text), **how)

    return Plain(highlight=False, markup=False, emoji=False, soft_wrap=not tty(), width=_width())


def _width() -> int | None:
    """Return the width of the output: None for a terminal, the terminal's behind a pipe, else 120."""
    if tty():
        return None
    try:
        piped = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
        return (piped and os.get_terminal_size(sys.stderr.fileno()).columns) or 120
    except (OSError, ValueError):  # neither is a terminal, or not even a file
        return 120


def _failed(message: str, argv: Sequence[str] | None, code: int) -> int:
    """Print why the command ended as one line, after the traceback if --traceback was given; return the code."""
    if "--traceback" in (sys.argv if argv is None else argv):
        traceback.print_exc()
    sys.stderr.write(f"fedspeed: {visible(message)}\n")
    return code


def _unexpected(error: Exception) -> str:
    """Return what to do about an error that no code expected: install what is missing, or report a defect."""
    if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
        return f"{error.name} is not installed for {sys.executable}; run `make setup`, or `pip install -e .`"
    return f"{one_line(error)}; a defect: please report it with what --traceback shows"


def _each_once() -> Callable[..., None]:
    """Return a function that shows each warning once, as one line: runs of one command may repeat it."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: object) -> None:
        if str(message) not in seen:
            sys.stderr.write(f"fedspeed: warning: {visible(str(message))}\n")
        seen.add(str(message))

    return show
