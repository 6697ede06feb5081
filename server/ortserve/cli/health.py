"""The command ``ortserve health``: checks whether a server on this machine is ready, for container engines and scripts.

It reads the server's own options, so that both can use the same environment or file. It asks the metrics port, as
Kubernetes' probes do, because the other ports may require a client certificate or be at their connection limit. If that
port uses TLS, the certificate is not verified: few certificates are valid for a local address, and the request contains
no secret.
"""

import argparse
import http.client
import math
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ortserve.cli.output import write_output

_LOCAL: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared with, not listened on
"""The local address of a server that listens on all interfaces."""
_DEFAULTS: Final = {"host": "127.0.0.1", "metrics_port": "8002", "tls_metrics": "false"}
_SWITCHES: Final = {"true": True, "1": True, "false": False, "0": False}


def main(arguments: Sequence[str]) -> int:
    """Check once. Returns 0 if the server is ready, 1 if it is not or does not answer, 2 for invalid options.

    Statuses 1 and 2 come with a line on standard error.
    """
    flags = vars(build_parser().parse_args(arguments))
    asks_live, timeout_s, config_path = flags.pop("live"), flags.pop("timeout_s"), flags.pop("config", None)
    address = None if config_path or os.environ.get("ORTSERVE_CONFIG") else _plain_address(flags)
    if address is None:
        from ortserve.config.options import OptionsError, read_options  # only here: pydantic takes most of the time

        try:
            options = read_options(flags, config_path)
        except OptionsError as error:
            sys.stderr.writelines(f"ortserve health: {problem}\n" for problem in error.problems)
            return 2
        address = options.host, options.metrics_port, options.tls_metrics
    host, port, has_tls = address
    if port == 0:
        sys.stderr.write("ortserve health: metrics_port: expected the port of the server, got 0\n")
        return 2
    question = "live" if asks_live else "ready"
    if problem := _ask(_LOCAL.get(host, host), port, question, timeout_s, has_tls=has_tls):
        sys.stderr.write(f"ortserve health: not {question}: {problem}\n")
        return 1
    return write_output("health", f"{question}\n")


def _plain_address(flags: Mapping[str, Any]) -> tuple[str, int, bool] | None:
    """Host, metrics port, and whether that port uses TLS, from flags and variables. None for values to be checked.

    Container engines run this command every few seconds. Reading all options would take most of its time.
    """
    given = {
        name: str(flags.get(name, os.environ.get(f"ORTSERVE_{name.upper()}") or default))
        for name, default in _DEFAULTS.items()
    }
    port, has_tls = given["metrics_port"], _SWITCHES.get(given["tls_metrics"].lower())
    if not (port.isascii() and port.isdigit() and int(port) < 2**16) or has_tls is None or not given["host"]:
        return None
    return given["host"], int(port), has_tls


def build_parser() -> argparse.ArgumentParser:
    """Create the flags. Server options stay texts; options that are not given are omitted."""
    parser = argparse.ArgumentParser(
        prog="ortserve health",
        description="Check whether the server on this machine is ready for requests. "
        "Exit status: 0 ready, 1 not ready or no answer, 2 invalid options.",
        epilog="All flags but --live and --timeout-s can be set by the server's environment variables: "
        "ORTSERVE_HOST, ORTSERVE_METRICS_PORT, ORTSERVE_TLS_METRICS and ORTSERVE_CONFIG.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--live",
        action="store_true",
        default=False,
        help="Check liveness instead: true while models load, false while the server stops.",
    )
    parser.add_argument(
        "--host",
        metavar="TEXT",
        help="Address of the server, as its option --host; for all interfaces, the local address is used.",
    )
    parser.add_argument("--metrics-port", metavar="N", help="Metrics port of the server, as its option --metrics-port.")
    parser.add_argument(
        "--tls-metrics", action=argparse.BooleanOptionalAction, help="Use TLS, as the server's option --tls-metrics."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="Options file of the server.")
    parser.add_argument(
        "--timeout-s", type=_seconds, default=3.0, metavar="SECONDS", help="Time limit of the answer. Default: 3."
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected number, above 0 and up to 3600, in seconds, got {text!r}")
    return seconds


def _ask(host: str, port: int, question: str, timeout_s: float, *, has_tls: bool) -> str | None:
    """The reason why the server is not ready; None if it is."""
    # Without a client library, because the command runs every few seconds.
    try:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        host.encode("idna")  # as the lookup does
    except (UnicodeError, http.client.InvalidURL):
        return f"host: expected an IP address or host name, got '{host}'"
    if has_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    try:
        connection.request("GET", f"/v2/health/{question}")
        answer = connection.getresponse()
        text = answer.read(1000).decode(errors="replace")
        body = "".join(letter if letter.isprintable() else " " for letter in text).strip()  # it may be another server
    except TimeoutError:
        return f"{address} did not answer within {timeout_s:g} s"
    except (ConnectionResetError, http.client.BadStatusLine):  # the result of plain text on a TLS port
        if has_tls:
            return f"{address} closed the connection without an answer"
        option = "--tls-metrics or ORTSERVE_TLS_METRICS"
        return f"{address} did not answer in plain HTTP; if the server speaks TLS there, set {option}"
    except (OSError, http.client.HTTPException) as error:
        return f"{address}: {getattr(error, 'strerror', None) or repr(error)}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"{address} answered {answer.status} {body}"
