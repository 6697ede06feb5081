"""The control groups that this process belongs to, as folders of the kernel's file system."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
SELF_CGROUP: Final = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, root: Path, self_cgroup: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process' groups of a controller, and of all groups above them that are visible here.

    Yields:
        A folder, and whether its files are those of version 2. Nothing where ``self_cgroup`` cannot be read.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        # In a container the path may be the host's, which is not visible here; the root then is the container's own.
        folder = base / path.lstrip("/")
        while True:
            yield folder, not controllers
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
