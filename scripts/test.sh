#!/usr/bin/env bash
# Runs the tests, from nothing: environment, installation, pytest.
#
#   bash scripts/test.sh [pytest argument ...]     such as -k masks or -m cuda
#
# The active environment's torch is used if it imports; otherwise .venv is made and ${TORCH:-torch}
# installed into it. A wheel of sms_plugin that is installed there already is what gets tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment train,test pytest pytest_timeout hypothesis numpy \
  pytorch_lightning hydra omegaconf matplotlib rich tokenizers scipy jinja2 markdown_it tensorboard
# Not `python -m pytest`: it puts this folder first on the path, before an installed wheel.
exec "$PYTHON" -c 'import os, sys
sys.path[:] = [path for path in sys.path if path] + [os.getcwd()]
import pytest
sys.exit(pytest.main())' "$@"
