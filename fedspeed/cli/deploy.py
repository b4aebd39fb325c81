"""`fedspeed deploy`: a run on devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\
`flower` writes a Flower app that runs any method on SuperNodes: app.py with the method, the model, the plan and a
function for each device's data, a pyproject.toml, and a README.md with every command, also for TLS and for the devices'
keys. As written it trains on digits. `check` executes an app's app.py and prints in one line what is missing: flwr, the
data of a client, the server's address, its certificate, a key. docs/guides/flower.md explains every step.

examples:
  fedspeed deploy flower my_app
  fedspeed deploy check my_app --client 0
  fedspeed deploy check my_app --superlink 127.0.0.1:9092 --root-certificates my_app/keys/ca.crt
  fedspeed deploy check my_app --key my_app/keys/device-0
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the action, the folder, and what is checked."""
    parser.epilog = EPILOG
    parser.add_argument("action", choices=("flower", "check"), help="write a Flower app, or check one")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the app's folder; new or empty for `flower`")
    parser.add_argument("--client", type=int, metavar="N", help="check: load the data of this client")
    parser.add_argument("--superlink", metavar="HOST:PORT", help="check: connect to the server")
    parser.add_argument(
        "--root-certificates", type=Path, metavar="FILE", help="check: the authority of its certificate, ca.crt"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="check: the private key of a SuperNode")


def main(args: argparse.Namespace, console: Console) -> int:
    """Write an app, or check one."""
    if args.action == "check":
        from ..flower.check import checks

        for line in checks(args.folder, args.client, args.superlink, args.root_certificates, args.key):
            console.print(line)
        return 0
    from ..flower.template import write_app

    for path in write_app(args.folder):
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"next: edit {args.folder / 'app.py'}, then follow {args.folder / 'README.md'}", soft_wrap=True)
    return 0
