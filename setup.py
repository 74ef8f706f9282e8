"""What pyproject.toml can't say: csrc goes into the wheel, and a library makes it a platform's."""

import atexit
import shutil
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CARRIED_LIBRARY = ROOT / "sms_plugin" / "lib" / "libsms_plugin.so"


# A build folder in the checkout would bring files of earlier builds into the wheel.
BUILD_FOLDER = tempfile.mkdtemp(prefix="sms_plugin-build-")
atexit.register(shutil.rmtree, BUILD_FOLDER, ignore_errors=True)


class WithCarriedLibrary(Distribution):
    """Binary if `python -m sms_plugin.build` has put a library into the package."""

    def has_ext_modules(self):
        return CARRIED_LIBRARY.is_file()


class BuildWithSources(build_py):
    """Copies csrc into the package. As a subpackage it would break `pip install -e`."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "sms_plugin" / "csrc"
            shutil.copytree(ROOT / "csrc", target, dirs_exist_ok=True)


class AnyPythonWheel(bdist_wheel):
    """The library isn't an extension module: it needs a kind of machine, and no kind of Python."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    distclass=WithCarriedLibrary,
    cmdclass={"build_py": BuildWithSources, "bdist_wheel": AnyPythonWheel},
    options={"build": {"build_base": BUILD_FOLDER}},
)
