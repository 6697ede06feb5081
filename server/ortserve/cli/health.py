"""``ortserve health``: asks a server that runs here whether it is ready, for container engines and scripts.

It finds the server by the server's own options, so that the same environment or file serves both, and asks the metrics
port, as Kubernetes' probes do: the others may ask for a client's certificate, or be full. Where that port speaks TLS it
does not verify the certificate: it asks this machine, by an address that few certificates are for, and tells nothing.
"""

import argparse
import http.client
import math
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ortserve.config.options import OptionsError, flag_name, read_options, variable_name

_LOCAL: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared with, not listened on
"""Where to ask a server that listens on every interface."""


def main(arguments: Sequence[str]) -> int:
    """Ask once. Returns 0 where the answer is yes, 1 where it is no or does not come, 2 where nothing can be asked.

    Anything but yes is explained by a line on standard error.
    """
    flags = vars(build_parser().parse_args(arguments))
    asks_live, timeout_s, config_path = flags.pop("live"), flags.pop("timeout_s"), flags.pop("config", None)
    try:
        options = read_options(flags, config_path)
    except OptionsError as error:
        sys.stderr.writelines(f"ortserve health: {problem}\n" for problem in error.problems)
        return 2
    if options.metrics_port == 0:
        sys.stderr.write("ortserve health: metrics_port: expected the port that the server listens on, got 0\n")
        return 2
    question = "live" if asks_live else "ready"
    host = _LOCAL.get(options.host, options.host)
    if problem := _ask(host, options.metrics_port, question, timeout_s, has_tls=options.tls_metrics):
        sys.stderr.write(f"ortserve health: not {question}: {problem}\n")
        return 1
    sys.stdout.write(f"{question}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The flags; those that are the server's stay text and are left out where they were not given."""
    parser = argparse.ArgumentParser(
        prog="ortserve health",
        description="Ask the server that runs on this machine whether it is ready for requests. "
        "Exit status: 0 yes, 1 no or no answer, 2 wrong options.",
        epilog="All but the question and the timeout comes from the server's environment variables, too: "
        "ORTSERVE_HOST, ORTSERVE_METRICS_PORT, ORTSERVE_TLS_METRICS and ORTSERVE_CONFIG.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--live",
        action="store_true",
        default=False,
        help="ask whether it is of use, loaded or not; not once it stops",
    )
    parser.add_argument("--host", metavar="TEXT", help="the server's option; every interface means this machine")
    parser.add_argument("--metrics-port", metavar="N", help="the server's option")
    parser.add_argument("--tls-metrics", action=argparse.BooleanOptionalAction, help="the server's option")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's file of options")
    parser.add_argument(
        "--timeout-s", type=_seconds, default=3.0, metavar="SECONDS", help="how long to wait for the answer; default: 3"
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
    """Say why the answer is not yes; ``None`` where it is."""
    # By hand rather than with a client library: it runs every few seconds, and half of its time is Python's start.
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    if has_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    try:
        connection.request("GET", f"/v2/health/{question}")
        answer = connection.getresponse()
        body = answer.read(1000).decode(errors="replace").strip()
    except TimeoutError:
        return f"{address} did not answer within {timeout_s:g} s"
    except (ConnectionResetError, http.client.BadStatusLine):  # what plain text meets where TLS is spoken
        if has_tls:
            return f"{address} closed the connection without an answer"
        flag, variable = flag_name("tls_metrics"), variable_name("tls_metrics")
        return f"{address} did not answer in plain HTTP; if the server speaks TLS there, set {flag} or {variable}"
    except (OSError, http.client.HTTPException) as error:
        return f"{address}: {getattr(error, 'strerror', None) or repr(error)}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"{address} answered {answer.status} {body}"
