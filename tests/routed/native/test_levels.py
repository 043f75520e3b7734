"""`check.c`, which needs neither Python nor torch, at every level of this processor and of an emulated ARM one.

Regions run in threads of the library here; the tests in Python run them by OpenMP.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from prescore.routed.native.build import CODE_FLAGS, FOLDER, PLAIN_FLAGS, SOURCES, levels_of_machine
from prescore.routed.native.library import levels_of_processor

pytestmark = pytest.mark.slow
CHECK = Path(__file__).with_name("check.c")
ARM_COMPILERS = {"gcc": ("aarch64-linux-gnu-gcc",), "clang": ("clang", "--target=aarch64-linux-gnu")}
ARM_EMULATOR = "qemu-aarch64"
# the plainest processor that has the level: an instruction of a higher one ends the program
ARM_PROCESSORS = {"baseline": "cortex-a53", "dotprod": "cortex-a76"}
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (cc, gcc, clang)")
needs_arm = pytest.mark.skipif(
    not (shutil.which(ARM_COMPILERS["gcc"][0]) and shutil.which(ARM_EMULATOR)),
    reason="64-bit ARM is not emulated here (Debian: apt-get install gcc-aarch64-linux-gnu qemu-user)",
)


def run_check(folder, compiler, flags, runner=()):
    """Compile `check.c` with the sources it checks, run it, and return what it prints: names and numbers."""
    program = folder / "check"
    included = ("index.c", "lists.c")
    sources = [path for path in sorted(FOLDER.glob("*.c")) if path.name not in included]
    folders = [part for folder in SOURCES for part in ("-I", folder)]
    command = [*compiler, *CODE_FLAGS, *flags, *folders, CHECK, *sources, "-o", program, "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([*runner, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(name, float(number)) for name, number in map(str.split, done.stdout.splitlines())]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the code without vector instructions of its own prints."""
    return run_check(tmp_path_factory.mktemp("plain"), [COMPILER], PLAIN_FLAGS)


def assert_equal(got, wanted, level):
    """The same keys are read, and numbers differ by rounding: of float32, or of bfloat16 weights."""
    assert len(got) == len(wanted) > 500
    size = 1e-3 if level == "avx512_bf16" else 1e-5
    for (name, number), (_, other) in zip(got, wanted, strict=True):
        assert number == pytest.approx(other, rel=size, abs=size), name


@needs_compiler
@pytest.mark.parametrize("level", levels_of_machine())
def test_a_level_of_this_processor(tmp_path, plain, level):
    if level not in levels_of_processor():
        pytest.skip(f"this processor does not have {level}")
    assert_equal(run_check(tmp_path, [COMPILER], levels_of_machine()[level]), plain, level)


@needs_compiler
@needs_arm
@pytest.mark.parametrize("compiler", ARM_COMPILERS)
@pytest.mark.parametrize("level", levels_of_machine("aarch64"))
def test_a_level_of_an_emulated_arm_processor(tmp_path, plain, level, compiler):
    if shutil.which(ARM_COMPILERS[compiler][0]) is None:
        pytest.skip(f"there is no {compiler} here")
    flags = ("-static", *levels_of_machine("aarch64")[level])  # the emulator needs no libraries of ARM
    runner = (ARM_EMULATOR, "-cpu", ARM_PROCESSORS[level])
    assert_equal(run_check(tmp_path, ARM_COMPILERS[compiler], flags, runner), plain, level)
