import socket

import pytest

from ortserve.errors import ServeError
from ortserve.listening import draw_age_s, open_listener


def test_connection_ages_have_ten_percent_jitter() -> None:
    ages = [draw_age_s(100.0) for _ in range(1000)]
    assert all(90.0 <= age <= 110.0 for age in ages)
    assert min(ages) < 95.0
    assert max(ages) > 105.0


def test_kernel_buffers_a_bounded_part_of_an_answer_that_is_not_read() -> None:
    listener = open_listener("http_port", "127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()) as caller:
        connection, _ = listener.accept()
        with connection:
            caller.settimeout(10)
            connection.setblocking(False)
            taken = connection.send(bytes(8 << 20))

    assert taken < 2 << 20  # about 4 MB without the limit


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1:8000", ".svc", f"{'a' * 64}.svc"])
def test_host_that_is_no_address_or_name_is_named(host: str) -> None:
    with pytest.raises(ServeError, match="host: expected an IP address or host name, without brackets and port, got"):
        open_listener("http_port", host, 0)
