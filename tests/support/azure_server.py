"""A real server of Azure Blob Storage: Azurite, Microsoft's emulator, from npm."""

import base64
import hashlib
import hmac
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx
import obstore
from obstore.store import AzureStore

from apart import CACHE, UnavailableError, keep, run_tool
from servers import LONG_S

ACCOUNT: Final = "devstoreaccount1"
KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of the default account of every Azurite."""
_AZURITE: Final = "azurite@3.35.0"


class AzureServer:
    """Azurite with one container, in memory."""

    def __init__(self, container: str) -> None:
        """Start Azurite.

        Raises:
            UnavailableError: There is no npm, or it cannot install Azurite.
        """
        program = _installed() / "node_modules" / ".bin" / "azurite-blob"
        flags = ["--blobPort", "0", "--inMemoryPersistence", "--silent", "--disableTelemetry"]
        self._process = subprocess.Popen([program, *flags], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = next(filter(None, (re.search(r"listens on (http://\S+)", line) for line in self._process.stdout)))
        self._endpoint = f"{found[1]}/{ACCOUNT}"
        self._reader = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._reader.start()
        self._container = container
        self._call("PUT", container, query="restype=container")
        self._store = AzureStore(
            container,
            config={"account_name": ACCOUNT, "account_key": KEY, "endpoint": self._endpoint},
            client_options={"allow_http": True},
        )

    def environment(self, key: str = KEY) -> dict[str, str]:
        """Variables that direct a client to this server."""
        return {
            "AZURE_STORAGE_ENDPOINT": self._endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": key,
            "AZURE_ALLOW_HTTP": "true",
        }

    def upload(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            obstore.put(self._store, name, content)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def put_key(self, key: str) -> None:
        """Create an empty blob whose name may be one that obstore cannot represent."""
        self._call("PUT", f"{self._container}/{key}", {"x-ms-blob-type": "BlockBlob"})

    def delete_key(self, key: str) -> None:
        self._call("DELETE", f"{self._container}/{key}")

    def _call(self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({}), query: str = "") -> None:
        """Make a call that obstore cannot make, signed as in "Authorize with Shared Key"."""
        given = {**headers, "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = [method, *[""] * 11, *(f"{name}:{value}" for name, value in given.items())]
        signed = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{path}", *([query.replace("=", ":")] if query else [])])
        digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        given["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self._endpoint}/{path}?{query}"
        httpx.request(method, url, headers=given, timeout=LONG_S).raise_for_status()


def _installed() -> Path:
    """Install Azurite, unless another test has. Returns its folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError("npm, for Azurite, is not installed")
    folder = CACHE / _AZURITE
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            whole = Path(scratch) / "whole"
            run_tool([npm, "install", "--silent", "--no-audit", "--no-fund", f"--prefix={whole}", _AZURITE])
            keep(whole, folder)
    return folder
