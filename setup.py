"""Builds the C operators beside the Python files; everything else about the package is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src", "prescore", "routed", "native")


class BuildWithNative(build_py):
    """Python files, then the libraries: beside the copies, or in an editable installation beside the sources."""

    def run(self) -> None:
        """Build; without a C compiler the package is pure."""
        super().run()
        folder = NATIVE if self.editable_mode else Path(self.build_lib, "prescore", "routed", "native")
        built = runpy.run_path(str(NATIVE / "build.py"))["build"](folder)
        # setuptools asks this wherever a package with compiled files is treated apart
        self.distribution.has_ext_modules = lambda: bool(built)


class TaggedWheel(bdist_wheel):
    """A wheel for any Python 3 of one platform where it carries a library, for any platform where not."""

    def run(self) -> None:
        """Build first: what was built decides the tag."""
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """The libraries know neither Python nor torch."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": TaggedWheel})
