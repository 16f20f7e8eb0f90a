"""Build hooks of pip (declared in setup.cfg).

A wheel gets csrc/ as xrunner/csrc/, with the library compiled from it. For an editable checkout
(`pip install -e`) the library is compiled into the user's cache, where runs look for it. Without a
compiler there is no library, and the runner compiles one where it can (xrunner.ops.cpu.native).
setuptools loads this file alone, before anything of this project can be imported."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel  # type: ignore[import-untyped]
from setuptools.command.build_py import build_py  # type: ignore[import-untyped]

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("*.cpp", "*.h", "*.cu")


def _build() -> ModuleType:
    """The module xrunner.ops.build, loaded from its file."""
    path = Path(__file__).with_name("build.py")
    spec = importlib.util.spec_from_file_location("xgpt_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sources() -> list[Path]:
    return sorted(path for pattern in _SOURCES for path in (_ROOT / "csrc").rglob(pattern))


class BuildPy(build_py):  # type: ignore[misc]  # setuptools is untyped
    """Builds Python files with the native operators beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout's own csrc/ is used
            self._keep()
        else:
            self._copy_sources()
            self._compile()

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self._native_files())]

    def get_source_files(self) -> list[str]:
        """Files of a source distribution."""
        return [*super().get_source_files(),
                *(str(path.relative_to(_ROOT)) for path in _sources())]

    def _folder(self) -> Path:
        return Path(self.build_lib) / "xrunner" / "csrc"

    def _native_files(self) -> list[Path]:
        return sorted(path for path in self._folder().rglob("*") if path.is_file())

    def _copy_sources(self) -> None:
        shutil.rmtree(self._folder(), ignore_errors=True)  # of an earlier build in this tree
        for source in _sources():
            target = self._folder() / source.relative_to(_ROOT / "csrc")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def _keep(self) -> None:
        build = _build()
        try:
            build.compile_for_user()
        except (build.BuildError, OSError, RuntimeError, ValueError) as error:
            # nothing depends on it, and a user may have no home
            self.warn(f"the native operators are not compiled now: {error}")

    def _compile(self) -> None:
        build = _build()
        try:
            build.compile_library(self._folder(), self._folder() / build.LIBRARY,
                                  build.find_compiler())
        except build.BuildError as error:
            self.warn(f"this wheel has no native operators: {error}")


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for this platform if it has a library, else for any; for any Python. The library is
    loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if any(Path(self.bdist_dir).rglob("libxgpt_native.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return python, abi, platform
