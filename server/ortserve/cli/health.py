"""``ortserve health``: asks a server that runs here whether it is ready, for container engines and scripts.

It finds the server by the server's own options, so that the same environment or file serves both. Where that server
speaks TLS it does not verify the certificate, as Kubernetes' probes do not: it asks this machine, by an address that
few certificates are for, and tells nothing. Where clients must bring certificates it has none, and asks the metrics
port.
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
    asks_http = options.tls_client_ca_file is None
    port = options.http_port if asks_http else options.metrics_port
    if port == 0:
        name = "http_port" if asks_http else "metrics_port"
        sys.stderr.write(f"ortserve health: {name}: expected the port that the server listens on, got 0\n")
        return 2
    tls_option = "tls_cert_file" if options.tls_cert_file is None else "tls_metrics"
    has_tls = options.tls_cert_file is not None and (asks_http or options.tls_metrics)
    question = "live" if asks_live else "ready"
    host = _LOCAL.get(options.host, options.host)
    if problem := _ask(host, port, question, timeout_s, unset_tls_option=None if has_tls else tls_option):
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
        "ORTSERVE_HOST, ORTSERVE_HTTP_PORT, ORTSERVE_TLS_CERT_FILE, ORTSERVE_CONFIG and so on.",
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
    parser.add_argument("--http-port", metavar="N", help="the server's option")
    parser.add_argument(
        "--metrics-port", metavar="N", help="the server's option; asked where clients must bring certificates"
    )
    for flag in ("--tls-cert-file", "--tls-client-ca-file"):
        parser.add_argument(flag, metavar="FILE", help="the server's option")
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


def _ask(host: str, port: int, question: str, timeout_s: float, *, unset_tls_option: str | None) -> str | None:
    """Say why the answer is not yes; ``None`` where it is.

    Asks over TLS, or where an option that would have it do so is unset, in plain text.
    """
    # By hand rather than with a client library: it runs every few seconds, and half of its time is Python's start.
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    if unset_tls_option is None:
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
        if unset_tls_option is None:
            return f"{address} closed the connection without an answer"
        flag, variable = flag_name(unset_tls_option), variable_name(unset_tls_option)
        return f"{address} did not answer in plain HTTP; if the server speaks TLS there, set {flag} or {variable}"
    except (OSError, http.client.HTTPException) as error:
        return f"{address}: {getattr(error, 'strerror', None) or repr(error)}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"{address} answered {answer.status} {body}"
