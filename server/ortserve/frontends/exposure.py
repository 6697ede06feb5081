"""What a server leaves open to everybody who reaches it, in the words that it says at its start. Pure."""

import ipaddress
from collections.abc import Container

from ortserve.service.access import Group


def open_to_everybody(
    host: str, guarded: Container[Group], *, loads_models: bool, shares_memory: bool
) -> tuple[str, ...]:
    """The groups that need no key on an address that others than this machine reach; none on the loopback address.

    Args:
        host: The option; a name other than ``localhost`` counts as reached by others.
        guarded: Groups with keys.
        loads_models: Whether callers may load and unload models.
        shares_memory: Whether callers may register shared memory.
    """
    if is_loopback(host):
        return ()
    control = ["log settings"]
    if loads_models:
        control.append("loading models")
    if shares_memory:
        control.append("shared memory")
    told = {Group.CONTROL: f"{Group.CONTROL} ({', '.join(control)})"}
    return tuple(told.get(group, str(group)) for group in Group if group not in guarded)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached by this machine alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"
