# Sourced by quickstart.sh and test.sh: chooses the Python to use and installs what is missing there.
#
#   use_environment EXTRAS MODULE...   sets PYTHON. EXTRAS are extras of pyproject.toml, and MODULEs
#                                      must be importable afterwards.
#
# The active environment is used if its torch imports, and that torch is never replaced. Otherwise
# .venv is made here and ${TORCH:-torch} installed into it; TORCH may hold options of pip as well.

say() { printf '==> %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# run_python CODE ARGUMENT...: quietly, with PYTHON, and without this folder on its path.
run_python() {
  local code=$1
  shift
  "$PYTHON" -c "import sys; sys.path[:] = [path for path in sys.path if path]
$code" "$@" >/dev/null 2>&1
}

imports() {
  run_python 'import importlib
for name in sys.argv[1:]: importlib.import_module(name)' "$@"
}

# Whether sms_plugin is there already: from this checkout, or from a wheel in site-packages (another
# checkout's doesn't count: its code would be taken for this one's).
has_sms_plugin() {
  run_python 'import importlib.util, pathlib, sysconfig
spec = importlib.util.find_spec("sms_plugin")
package = pathlib.Path(spec.origin).resolve().parent
folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sys.argv[1]]
sys.exit(package.parent not in [pathlib.Path(folder).resolve() for folder in folders])' "$PWD"
}

make_venv() {
  local candidate
  for candidate in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
    PYTHON=$(command -v "$candidate") || continue
    run_python 'sys.exit(sys.version_info < (3, 10))' || continue
    say "no torch in the active environment: making .venv with $PYTHON"
    "$PYTHON" -m venv .venv && return
    rm -rf .venv
    fail "$PYTHON can't make an environment: install its venv module (apt-get install python3-venv)"
  done
  fail "no Python 3.10 or newer is on the PATH: install one (apt-get install python3 python3-venv)"
}

use_environment() {
  local extras=$1 candidate
  shift
  for candidate in python python3; do
    PYTHON=$(command -v "$candidate") || continue
    imports torch && break
    PYTHON=
  done
  if [ -n "$PYTHON" ]; then
    say "using the torch of the active environment ($PYTHON)"
  else
    [ -x .venv/bin/python ] || make_venv
    PYTHON=$PWD/.venv/bin/python
  fi

  if ! imports torch; then
    say "installing ${TORCH:-torch} into .venv"
    [ -n "${TORCH:-}" ] || say "a large download: torch from PyPI brings CUDA along (about 3 GB);" \
      "to avoid it, set TORCH to the pip requirement of a CPU build"
    # Not quoted: options of pip may stand behind the requirement.
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install ${TORCH:-torch} || fail "pip could not install ${TORCH:-torch}"
    imports torch || fail "the installed torch does not import: $PYTHON -c 'import torch' says why"
  fi
  if ! has_sms_plugin; then
    say "installing this checkout with [$extras] into the environment of $PYTHON"
    "$PYTHON" -m pip install --quiet --editable ".[$extras]" || fail "pip could not install the checkout"
  elif ! imports "$@"; then
    say "installing what sms_plugin[$extras] needs into the environment of $PYTHON"
    "$PYTHON" -m pip install --quiet "sms_plugin[$extras]" || fail "pip could not install [$extras]"
  fi
  imports "$@" || fail "after the installation one of these still doesn't import: $*"
}
