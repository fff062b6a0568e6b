#!/usr/bin/env bash
# What only a GPU can show, in at most 8 minutes: attention by masks, blocks and kernels,
# compared with a softmax in float64; training by several batching methods; loading.
#
#     pip install -e ".[gpu]" && bash benchmarks/gpu.sh
#     bash benchmarks/gpu.sh small    # the same programs, on any machine
set -uo pipefail
cd "$(dirname "$0")"

sizes=(--tokens 16384 --width 1024 --heads 16 --seq-lens 352,2048,8192)
model=(--width 1024 --layers 8 --max-len 2048 --max-tokens 32768 --seconds 15)
if [ "${1:-}" = small ]; then
  sizes=(--tokens 352 --width 128 --heads 2 --seq-lens 100,352 --rounds 1)
  model=(--width 64 --layers 1 --max-len 256 --max-tokens 1024 --seconds 1)
fi
status=0
python end_to_end/speed.py "${model[@]}" --dtype bfloat16 || status=1
python end_to_end/speed.py "${model[@]}" --sleep 0.03 --methods bucketed,packed || status=1
python attention.py "${sizes[@]}" --dtypes bfloat16,float32 || status=1
exit $status
