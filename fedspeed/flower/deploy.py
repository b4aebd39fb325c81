"""`fedspeed deploy`: writes an app, or checks one, a device's data and key, and its connection to the server."""

from __future__ import annotations

import socket
import ssl
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError, one_line
from ..utils.files import read_bytes, write
from ..utils.own_code import find_code
from ..utils.registry import run_code
from . import require_flwr

FILES = {"pyproject.toml": "pyproject.toml", "app.py": "app.py.txt", "README.md": "README.md"}
"""Name in an app -> name in the folder `template`."""


def write_app(folder: Path) -> list[Path]:
    """Write the app into a new or empty folder; return its files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"deploy: expected a new or an empty folder, found {folder} with files in it; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent / "template"
    for name, source in FILES.items():
        write(folder / name, (here / source).read_bytes())
    write(folder / ".gitignore", "keys/\nruns/\nstates/\n*.db\n")
    return [folder / name for name in FILES]


PATIENCE = 10.0
"""Seconds to wait for a server's answer."""


def checks(
    folder: Path, client: int | None, superlink: str | None, root: Path | None, key: Path | None
) -> Iterator[str]:
    """Yield one line per check that passes; raise at the first that fails."""
    yield f"flwr {require_flwr()}"
    if key is not None:
        yield private_key(key)
    if superlink is not None:
        yield reachable(superlink, root)
    agreement, data, clients, name = app_of(folder)
    yield f"{folder}: {name}, {agreement.method.label}, {agreement.plan.rounds} rounds"
    if client is not None:
        from .device import loaded, own_part

        if not 0 <= client < clients:
            raise UserError(f"deploy: expected --client in 0..{clients - 1}, found {client}")
        found = own_part(loaded(data, client, {"fedspeed-client": client}), client, clients)
        yield f"client {client}: {found.sizes[client]} samples of shape {found.shape}, {found.classes or 'no'} classes"


def app_of(folder: Path) -> tuple[Any, Any, int, str]:
    """Return an app's agreement, data function, number of clients and name; this executes the app's code."""
    try:
        project = tomllib.loads(read_bytes(folder / "pyproject.toml").decode())
        components = project["tool"]["flwr"]["app"]["components"]
        server, client = (str(components[name]).partition(":") for name in ("serverapp", "clientapp"))
        name = str(project.get("project", {}).get("name", folder.name))
        config = {k.replace("-", "_"): v for k, v in project["tool"]["flwr"]["app"].get("config", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"deploy: expected {folder / 'pyproject.toml'} with [tool.flwr.app.components], found {one_line(error)}; "
            f"`fedspeed deploy flower DIR` writes one"
        ) from None
    path = folder / f"{client[0]}.py"
    try:
        module = run_code(path.resolve(), find_code(path.resolve()), "app")
        made = getattr(module, client[2]).fedspeed
        clients = int(getattr(module, server[2]).fedspeed[1].clients)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"deploy: expected {client[2]} = client_app(...) and {server[2]} = server_app(...) in {path}, found "
            f"{one_line(error)}"
        ) from None
    return made[0].configured(config), made[1], clients, name


def reachable(address: str, root: Path | None) -> str:
    """Check that a server answers at an address, with a certificate that the authority in `root` signed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"deploy: expected --superlink HOST:PORT, found {address!r}")
    try:
        context = ssl.create_default_context(cafile=None if root is None else str(root))
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"deploy: expected a certificate in {root}, found {one_line(error)}; it is the server's ca.crt"
        ) from None
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as secure,
        ):
            return f"{address}: {secure.version()}, certificate good"
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"deploy: {address} answers with a certificate that is not trusted ({error.verify_message}); give "
            f"--root-certificates its ca.crt, and the server's name or address to subjectAltName"
        ) from None
    except (OSError, OverflowError) as error:
        raise UserError(
            f"deploy: no server answers at {address} ({one_line(error)}); start flower-superlink there, open the port"
        ) from None


def private_key(path: Path) -> str:
    """Check that a file holds a key that a SuperNode can use: NIST EC, OpenSSH, no passphrase."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    fix = "make one with: ssh-keygen -t ecdsa -b 384 -N '' -f FILE"
    try:
        found = load_ssh_private_key(read_bytes(path), None)
    except OSError as error:
        raise UserError(f"deploy: expected a private key in {path}, found {error.strerror}; {fix}") from None
    except Exception as error:
        raise UserError(f"deploy: expected an OpenSSH private key in {path}, found {one_line(error)}; {fix}") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise UserError(f"deploy: expected a key on a NIST curve in {path}, found another kind; {fix}")
    return f"{path}: a key on {found.curve.name}"
