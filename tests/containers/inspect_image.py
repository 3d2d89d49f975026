"""What an image has, by the programs in it: run there, prints JSON. Standard library alone."""

import importlib.metadata
import importlib.util
import json
import os
import stat
import subprocess
from collections.abc import Iterator

VIRTUAL = ("/proc", "/sys", "/dev", "/run")
SBOM = "/opt/loadout/sbom.cdx.json"


def files() -> Iterator[tuple[str, os.stat_result]]:
    """Yields what the image's user can see, links themselves left out."""
    for folder, folders, names in os.walk("/"):
        folders[:] = [each for each in folders if os.path.join(folder, each) not in VIRTUAL]
        for name in (*folders, *names):
            path = os.path.join(folder, name)
            found = os.lstat(path)
            if not stat.S_ISLNK(found.st_mode):
                yield path, found


def is_read_only(folder: str) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def main() -> None:
    listed = list(files())
    with open(SBOM) as file:
        components = json.load(file)["components"]
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}=${Version}\n"]
    packages = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    answer = {
        "ids": [os.getuid(), os.getgid(), *os.getgroups()],
        "root_is_read_only": is_read_only("/"),
        "writable": sorted(path for path, _ in listed if os.access(path, os.W_OK)),
        "set_ids": sorted(
            path
            for path, found in listed
            if stat.S_ISREG(found.st_mode) and found.st_mode & (stat.S_ISUID | stat.S_ISGID)
        ),
        "installers": [name for name in ("pip", "ensurepip") if importlib.util.find_spec(name)],
        "python": sorted(
            f"{each.metadata['Name']}={each.version}" for each in importlib.metadata.distributions()
        ),
        "debian": sorted(
            line.split()[1] for line in packages.splitlines() if line.startswith("installed ")
        ),
        "components": [each["purl"] for each in components],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
