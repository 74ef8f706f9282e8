#!/usr/bin/env bash
# Trains the default model with softmax=fused, from nothing: environment, installation, training.
#
#   bash scripts/quickstart.sh [override ...]      such as trainer.max_steps=20 seed=1
#
# The active environment's torch is used if it imports; otherwise .venv is made and ${TORCH:-torch}
# installed into it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment train pytorch_lightning hydra omegaconf matplotlib rich tokenizers
say "$PYTHON train/run.py softmax=fused $*"
exec "$PYTHON" train/run.py softmax=fused "$@"
