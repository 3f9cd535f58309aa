#!/usr/bin/env bash
# Everything of benchmarks/gpu.py on one CUDA card in under 10 minutes: each part is a process with a time limit of its
# own, so that one that fails or hangs loses nothing of the others.
#
#   bash benchmarks/gpu.sh                 the tables go to stdout and to a Markdown file, and as JSON beside it
#   bash benchmarks/gpu.sh --out FILE.md   ... to this file
#   bash benchmarks/gpu.sh --tiny          tiny shapes, without a GPU too: tries the script out
#   bash benchmarks/gpu.sh first           a new kind of card: its tests, the demo and a resume, kernels, speed, memory
#
# PYTHON chooses the interpreter; OUT, if set, the folder of the files; PARTS, if set, the parts and their seconds.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tiny=() file="" parts="packed:120 memory:150 generate:70 ranks:40 train:210"
while [ $# -gt 0 ]; do
    case $1 in
        --tiny) tiny=(--tiny) ;;
        first) parts="tests:90 demo:180 kernels:110 shapes:210" ;;
        --out) file=${2:?--out needs a file}; shift ;;
        *) echo "usage: bash benchmarks/gpu.sh [first] [--tiny] [--out FILE.md]" >&2; exit 2 ;;
    esac
    shift
done
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -c 'A-Za-z0-9\n' '-')
file=${file:-${OUT:-benchmarks/results}/gpu-${card:-none}-$(date +%Y-%m-%d).md}
json=${file%.md}.json
mkdir -p "$(dirname "$file")"
rm -f "$json"

{
    echo "# ${card:-no GPU}, $(date +%Y-%m-%d)"
    for part in ${PARTS:-$parts}; do
        limit=${part#*:}
        # The part is told to begin nothing new 20 s before it is ended.
        timeout --kill-after=5 "$limit" "$python" -m benchmarks.gpu --part "${part%:*}" --seconds $((limit - 20)) \
            --json "$json" ${tiny[@]+"${tiny[@]}"}
        code=$?
        [ $code = 0 ] || printf '\n%s ended with code %s (124: its %s s were over)\n' "${part%:*}" $code "$limit"
    done
} | tee "$file"
echo "written to $file and $json" >&2
