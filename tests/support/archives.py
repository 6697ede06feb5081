"""Archives of repositories, and a plain HTTP server of the files in a folder."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def file_site(folder: Path) -> Iterator[str]:
    """Serve the files of a folder. Yields the address of the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_archive(path: Path, files: Iterable[tuple[str, bytes]], *more: tarfile.TarInfo) -> str:
    """Write an archive of files, then of members without content. Returns its SHA-256 digest."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files:
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in more:
            archive.addfile(member)
    return hashlib.sha256(path.read_bytes()).hexdigest()
