"""Compile the native library into the wheel, where there is a C compiler; without one the wheel goes without."""

import importlib.util
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src" / "plures" / "native"


class NativeLibrary(BuildHookInterface[Any]):
    """Add the compiled library to the wheel's files; an editable install compiles into the user's cache instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a temporary folder, which lives until the wheel is written."""
        if version == "editable" or sys.platform == "win32":
            return
        specification = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
        assert specification is not None
        assert specification.loader is not None
        build = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(build)
        self.folder = tempfile.TemporaryDirectory()
        # A cross compiler (CC) makes the library of another machine, which is named, and found there, by that machine.
        machine = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).rpartition("-")[2]
        platform.machine = lambda: machine
        try:
            path = build.compile_into(Path(self.folder.name), build.levels_of(machine))
        except build.CannotCompileError as error:
            self.app.display_warning(f"The wheel goes without the native library: {error}")
            return
        build_data["force_include"][str(path)] = f"plures/native/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def _platform_tag() -> str:
    from packaging.tags import platform_tags

    # The plain linux tag: the library needs nothing but the C library that it was compiled against.
    return next(tag for tag in platform_tags() if not tag.startswith("manylinux"))
