"""The right library is found, only in its folder, and behaves among threads and forks."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from prescore.errors import Unsupported
from prescore.routed.native import library
from prescore.routed.native.build import FOLDER, c_files, checksum_file, library_name

built = (FOLDER / library_name("baseline")).is_file()
needs_library = pytest.mark.skipif(not built, reason="the native operators are not built (make native)")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is found yet, and nothing found here is remembered."""
    monkeypatch.setattr(library, "_found", {})
    monkeypatch.delenv(library.VARIABLE, raising=False)


@pytest.fixture
def threads():
    """Put torch's number of threads back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def copy_library(level, folder):
    path = FOLDER / library_name(level)
    for original in (path, checksum_file(path)):
        shutil.copy(original, folder)
    return folder / path.name


def fake_cpuinfo(folder, flags, title="flags"):
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\n{title}\t\t: fpu {' '.join(flags)}\nbugs\t\t: none\n")
    return path


@needs_library
def test_the_best_level_of_the_processor_is_loaded_once():
    found = library.load()
    assert isinstance(found, ctypes.CDLL)
    assert library.load() is found
    built_levels = [each for each in library.levels_of_processor() if (FOLDER / library_name(each)).is_file()]
    assert library.describe_native().startswith(built_levels[-1])


@needs_library
def test_the_variable_is_read_at_every_call(monkeypatch):
    automatic = library.load()
    for level in library.levels_of_processor():
        monkeypatch.setenv(library.VARIABLE, level)
        assert library.load()._name == str(FOLDER / library_name(level))
        assert library.describe_native() == level
    monkeypatch.setenv(library.VARIABLE, "auto")
    assert library.load()._name == automatic._name


def test_zero_switches_it_off_and_unknown_values_are_refused(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "0")
    assert library.load() is None
    assert library.describe_native() == "none (PRESCORE_NATIVE=0)"
    for value in ("avx3", "../avx2", "yes"):
        monkeypatch.setenv(library.VARIABLE, value)
        for function in (library.load, library.describe_native):
            with pytest.raises(ValueError, match=f"PRESCORE_NATIVE must be .*, got '{value}'"):
                function()


def test_a_level_that_cannot_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(library.VARIABLE, "baseline")
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    with pytest.raises(Unsupported, match="PRESCORE_NATIVE=baseline cannot run: baseline: not built"):
        library.load()
    monkeypatch.setenv(library.VARIABLE, "avx512")
    monkeypatch.setattr(library, "levels_of_processor", lambda: ("baseline", "avx2"))
    with pytest.raises(Unsupported, match="PRESCORE_NATIVE=avx512 cannot run: this processor does not"):
        library.load()


@needs_library
def test_what_cannot_be_loaded_is_passed_over_and_named(monkeypatch, tmp_path):
    with monkeypatch.context() as other:  # of other sources
        other.setattr(library, "ABI", library.ABI + 1)
        assert library.load() is None
        assert f"has interface {library.ABI - 1} and not {library.ABI}" in library.describe_native()
    monkeypatch.setattr(library, "_found", {})
    best = library.levels_of_processor()[-1]
    (tmp_path / library_name(best)).write_text("not a library")
    if best != "baseline":
        copy_library("baseline", tmp_path)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    assert (library.load() is None) == (best == "baseline")
    assert f"{best}: cannot be loaded" in library.describe_native()
    for path in tmp_path.iterdir():
        path.unlink()
    monkeypatch.setattr(library, "_found", {})
    assert library.load() is None
    assert library.describe_native().endswith("baseline: not built)")


@needs_library
def test_a_damaged_library_is_passed_over(monkeypatch, tmp_path):
    """The loader of Linux would end the process."""
    path = copy_library("baseline", tmp_path)
    whole = path.read_bytes()
    half = len(whole) // 2
    monkeypatch.setattr(library, "levels_of_processor", lambda: ("baseline",))
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    cut = [whole[:size] for size in (0, 40, 64, 200, 4096, half, len(whole) * 9 // 10)]
    zeros = [whole[:size] + bytes(len(whole) - size) for size in (64, 4096, half)]
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    for damaged in (*cut, *zeros, flipped, whole + b"\0"):
        path.write_bytes(damaged)
        monkeypatch.setattr(library, "_found", {})
        assert library.load() is None
        reason = "cannot be loaded, the file differs from its checksum"
        assert library.describe_native() == f"none (baseline: {reason}, {library.REBUILD})"
    path.write_bytes(whole)
    monkeypatch.setattr(library, "_found", {})
    assert library.load() is not None


@needs_library
def test_a_library_without_its_checksum_is_passed_over(monkeypatch, tmp_path):
    missing = checksum_file(copy_library("baseline", tmp_path))
    missing.unlink()
    monkeypatch.setattr(library, "levels_of_processor", lambda: ("baseline",))
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    assert library.load() is None
    reason = f"cannot be loaded, {missing} is missing, {library.REBUILD}"
    assert library.describe_native() == f"none (baseline: {reason})"


@needs_library
def test_a_library_without_a_function_is_passed_over(monkeypatch):
    monkeypatch.setattr(library, "FUNCTIONS", (*library.FUNCTIONS, "prescore_of_tomorrow"))
    assert library.load() is None
    levels = ", ".join(reversed(library.levels_of_processor()))  # the reason is said once
    assert library.describe_native() == f"none ({levels}: lacks prescore_of_tomorrow, {library.REBUILD})"


def test_every_function_that_python_calls_is_looked_for():
    exported = {
        name
        for path in c_files()
        for name in re.findall(r"^PRESCORE_EXPORT .*?(prescore_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert {*library.FUNCTIONS, "prescore_native_abi"} == exported
    assert len(set(library.FUNCTIONS)) == len(library.FUNCTIONS)


def test_levels_of_x86_come_from_the_processor_and_from_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    avx2, avx512 = library._NEEDED["avx2"], library._NEEDED["avx512"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, avx512)) == ("baseline", "avx2", "avx512")
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, avx512 | {"avx512_bf16"}))[-1] == "avx512_bf16"
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, avx512 - {"avx512_vnni"})) == ("baseline", "avx2")
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, avx2 - {"bmi2"})) == ("baseline",)
    assert library.levels_of_processor(tmp_path / "none") == ("baseline", "avx2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, avx512)) == ("baseline", "avx2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, avx512)) == ("baseline",)


def test_levels_of_arm_come_from_the_processor(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    features = library._NEEDED["dotprod"]
    both = ("baseline", "dotprod")
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, features, "Features")) == both
    assert library.levels_of_processor(fake_cpuinfo(tmp_path, features - {"asimddp"}, "Features")) == both[:1]
    for system, levels in (("linux", both[:1]), ("darwin", both)):  # there is no /proc on macOS
        monkeypatch.setattr(sys, "platform", system)
        assert library.levels_of_processor(tmp_path / "none") == levels


@needs_library
def test_torch_says_how_many_threads(threads):
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        assert library.load().prescore_native_threads() == n_threads


@needs_library
def test_two_python_threads_at_once(threads):
    """A thread of its own uses torch's number too, and neither disturbs the other."""
    torch.set_num_threads(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: [library.load().prescore_native_threads() for _ in range(500)], range(2)))
    assert found == [[2] * 500] * 2
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: library.load().prescore_native_threads()).result() == 1


FORK = """
import os, signal, sys, torch
from prescore.routed.native.library import _found, load
assert not _found  # importing loads nothing
torch.set_num_threads(2)
used = load().prescore_native_threads()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that waits for threads that are gone would wait for ever
    os._exit(load().prescore_native_threads())
_, status = os.waitpid(child, 0)
print(used, os.waitstatus_to_exitcode(status), load().prescore_native_threads())
"""


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_goes_on_with_one_thread_and_importing_loads_nothing():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "1", "2"], done.stderr
