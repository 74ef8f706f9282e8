#!/usr/bin/env bash
# Everything that a GPU must show, in one command: build, tests, correctness table, compute-sanitizer,
# and a quick look at the speed of every case.
#
#   bash scripts/gpu_check.sh OUT_DIR [--strict]
#
# Uses the current Python (PYTHON, or python, or python3) and this checkout; installs nothing. What has to
# be skipped is named; --strict fails on it. The summary comes last; under OUT_DIR lie summary.txt, the
# full output (check.log), verify.csv and softmax.csv.
set -uo pipefail

usage() { sed -n '5p' "$0" | sed 's/^# *//' >&2; exit 2; }
OUT= STRICT=0
for argument in "$@"; do
  case $argument in
    --strict) STRICT=1 ;;
    -*) usage ;;
    *) [ -z "$OUT" ] || usage; OUT=$argument ;;
  esac
done
[ -n "$OUT" ] || usage
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

LOG=$OUT/check.log
SUMMARY=$OUT/summary.txt
: >"$LOG"
: >"$SUMMARY"
failed=0 skipped=0
note() { printf '%s\n' "$*" | tee -a "$SUMMARY"; }
skip() { skipped=$((skipped + 1)); note "SKIPPED  $*"; }

PYTHON=${PYTHON:-$(command -v python || command -v python3 || true)}
[ -n "$PYTHON" ] || { note "FAILED   no python on the PATH: activate an environment with torch"; exit 1; }
# The checkout's own code, whatever is installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
has() { "$PYTHON" -c "import $1" >/dev/null 2>&1; }

machine=$("$PYTHON" - 2>&1 <<'PY'
import platform
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA GPU: torch.cuda.is_available() is False")
cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(f"{', '.join(cards)}; torch {torch.__version__}; Python {platform.python_version()}")
PY
) || {
  note "FAILED   $(printf '%s' "$machine" | tail -n 1)"
  note "         (asked $PYTHON; activate another environment, or name its Python in PYTHON)"
  exit 1
}
note "$machine"
revision=$(git rev-parse --short HEAD 2>/dev/null) && note "checkout $revision"

# step NAME SECONDS COMMAND...: its output goes to the log; the last line of it to the summary.
step() {
  local name=$1 limit=$2 started=$SECONDS status verdict=ok part=$OUT/.part
  shift 2
  printf '== %s\n' "$name"
  printf '== %s: %s\n' "$name" "$*" >>"$LOG"
  timeout -k 10 "$limit" "$@" >"$part" 2>&1
  status=$?
  cat "$part" >>"$LOG"
  [ $status -eq 0 ] || verdict=FAILED
  [ $status -eq 124 ] && echo "not finished within $limit s" >>"$part"
  [ $status -eq 0 ] || { failed=$((failed + 1)); tail -n 25 "$part"; }
  note "$(printf '%-8s %s: %s (%d s)' "$verdict" "$name" "$(tail -n 1 "$part")" $((SECONDS - started)))"
  return $status
}

step build 300 "$PYTHON" -c "
import sms_plugin, sms_plugin.extension, torch
library = sms_plugin.extension.load()
sms_plugin.scaled_mask_softmax(torch.zeros(2, 3, device='cuda'))
assert sms_plugin.call_counts()['scaled_mask_softmax']['cuda'] == 1
archs = sms_plugin.extension.read_stamp(sms_plugin.extension.library_path().parent).archs
print(f'CPU and CUDA {archs}, {sms_plugin.extension.library_path().stat().st_size / 2**20:.1f} MB')"

if has pytest; then
  workers=()
  if has xdist; then
    count=$(($(nproc) / 2))
    workers=(-n $((count < 1 ? 1 : count > 8 ? 8 : count)))
  fi
  has hypothesis || skip "random comparisons: hypothesis isn't installed"
  # Those that need a card: scripts/test.sh runs the others. Workers share the cores: each computes
  # with as many threads as are left to it.
  step tests 420 env OMP_NUM_THREADS=2 "$PYTHON" -m pytest -q -m cuda -rfEs \
    -p no:cacheprovider ${workers[@]+"${workers[@]}"} tests ||
    while IFS= read -r line; do note "         $line"; done \
      < <(grep -E '^(FAILED|ERROR) tests' "$OUT/.part" | cut -c 1-120 | head -n 30)
  while IFS= read -r line; do skip "test: ${line#SKIPPED }"; done \
    < <(grep '^SKIPPED \[' "$OUT/.part" | sort -u)
else
  skip "tests: pytest isn't installed"
fi

if has numpy; then
  step verify 240 "$PYTHON" scripts/verify.py --device cuda --out "$OUT/verify.csv"
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
      sanitize=("$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" scripts/sanitize_cases.py)
      printf '== %s\n' "$tool"
      printf '== %s\n' "${sanitize[*]}" >>"$LOG"
      started=$SECONDS
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 10 240 "${sanitize[@]}" >"$OUT/.part" 2>&1
      status=$?
      cat "$OUT/.part" >>"$LOG"
      if grep -qi 'device not supported' "$OUT/.part"; then
        skip "$tool: compute-sanitizer doesn't support this machine's device"
      elif [ $status -eq 0 ] && grep -q 'all right' "$OUT/.part"; then
        note "ok       $tool: $(grep -m 1 'SUMMARY' "$OUT/.part" | sed 's/^=* *//') ($((SECONDS - started)) s)"
      else
        failed=$((failed + 1))
        tail -n 25 "$OUT/.part"
        note "FAILED   $tool: status $status, $(tail -n 1 "$OUT/.part") ($((SECONDS - started)) s)"
      fi
    done
  else
    skip "memcheck, racecheck: no compute-sanitizer on the PATH or in /usr/local/cuda*/bin"
  fi
else
  skip "verify, memcheck, racecheck: numpy isn't installed"
fi

step speed 180 "$PYTHON" scripts/bench_softmax.py --device cuda --quick --out "$OUT/softmax.csv"
rm -f "$OUT/.part"

printf '\n'
cat "$SUMMARY"
[ "$STRICT" = 0 ] || [ "$skipped" = 0 ] || failed=$((failed + 1))
if [ "$failed" -gt 0 ]; then
  strictly=$([ "$STRICT" = 1 ] && [ "$skipped" -gt 0 ] && printf ' (--strict: what was skipped counts)')
  note "FAILED: see $LOG$strictly"
  exit 1
fi
note "everything passed, $skipped skipped, $SECONDS s"
