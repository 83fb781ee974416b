#!/usr/bin/env bash
# One run in several processes of this machine, each with its share of the GPUs:
#
#     launch/local.sh 2 --config=configs/grpo.py
#
# A single process uses all GPUs of a machine; several show, with GPUs or without, that a run works in several processes
# before it goes to a cluster. PYTHON names the interpreter (python), PORT the coordinator's port (a free one).
set -euo pipefail

if [[ $# -lt 1 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/local.sh PROCESSES [--config=FILE ...]" >&2
  exit 2
fi
count=$1
shift
python=${PYTHON:-python}
port=${PORT:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export JAXRL_COORDINATOR=localhost:$port JAXRL_PROCESS_COUNT=$count

gpus=0
if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # JAX_LOCAL_DEVICE_IDS counts among these; -1 is none
  IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES#-1}"
  gpus=${#visible[@]}
elif command -v nvidia-smi >/dev/null; then
  gpus=$(nvidia-smi --list-gpus | wc -l)
fi
share=$((gpus / count))
if ((gpus > 0 && share == 0)) && [[ ${JAX_PLATFORMS:-} != cpu ]]; then
  echo "error: $count processes cannot share $gpus GPUs; start $gpus or fewer" >&2
  exit 2
fi

pids=()
for ((index = 0; index < count; index++)); do
  if ((share > 0)); then
    JAX_LOCAL_DEVICE_IDS=$(seq -s, $((index * share)) $((index * share + share - 1)))
    export JAX_LOCAL_DEVICE_IDS
  fi
  JAXRL_PROCESS_INDEX=$index "$python" -u -m jaxrl_llm.train "$@" &
  pids+=($!)
done

# A signal interrupts `wait`; the processes then save their state, and are waited for again.
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM

code=0
for pid in "${pids[@]}"; do
  own=0
  wait "$pid" || own=$?
  while kill -0 "$pid" 2>/dev/null; do
    own=0
    wait "$pid" || own=$?
  done
  if ((own > code)); then
    code=$own
  fi
done
exit "$code"
