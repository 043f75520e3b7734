"""Run tests on C operators that check addresses and undefined behaviour: `python tools/sanitize.py TEST...`.

Libraries are loaded from the package's own folder only, so the package is copied, built with the checks in the
copy, and imported from there. The working tree keeps its libraries.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = Path("prescore", "routed", "native")

CHECK = """
import sys
from prescore.routed.native import library
if library.load() is None or str(library._FOLDER) != sys.argv[1]:
    sys.exit(f"sanitize must run {sys.argv[1]}, got {library._FOLDER}: {library.describe_native()}")
"""


def main(tests: list[str]) -> int:
    """The exit code of pytest, or 1 where the libraries cannot be built."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "src")
        libraries = shutil.ignore_patterns("*.so", "*.sha256")
        shutil.copytree(ROOT / "src" / "prescore", source / "prescore", ignore=libraries)
        build = runpy.run_path(str(source / NATIVE / "build.py"))["build"]
        if not build(source / NATIVE, sanitize=True):
            return 1
        environment = {
            **os.environ,
            "PYTHONPATH": str(source),
            # the checks must be in place before the first allocation of the process
            "LD_PRELOAD": runtime("libasan.so"),
            # Python and torch keep what they allocate until the process ends
            "ASAN_OPTIONS": "detect_leaks=0",
        }
        # a run that loads other libraries, or none, would prove nothing
        check = [sys.executable, "-c", CHECK, str(source / NATIVE)]
        if subprocess.run(check, cwd=ROOT, env=environment, check=False).returncode:
            return 1
        # the report of a fault ends the process: neither it nor the name of the test may wait in a buffer
        shown = ("--capture=sys", "-vv")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *shown, *tests]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def runtime(name: str) -> str:
    """Where the compiler keeps a library of its checks."""
    compiler = os.environ.get("CC", "cc").split()
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
