#!/usr/bin/env bash
# A real model on one CUDA card, and steps in the shapes of larger ones: four parts of benchmarks/gpu.py. Needs the
# packages of requirements-real.txt, and for the last part GSM8K of the hub, or its folder in the variable GSM8K.
#
#   bash benchmarks/real.sh [--tiny] [--out FILE.md]    PYTHON, OUT and PARTS as for benchmarks/gpu.sh
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -c 'A-Za-z0-9\n' '-')
export PARTS=${PARTS:-sums:240 fits:540 shapes:540 gsm8k:1800}
exec bash "$(dirname "$0")/gpu.sh" --out "${OUT:-benchmarks/results}/real-${card:-none}-$(date +%Y-%m-%d).md" "$@"
