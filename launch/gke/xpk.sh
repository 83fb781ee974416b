#!/usr/bin/env bash
# A run on slices of TPUs of a GKE cluster that xpk has made:
#
#     CLUSTER=my-cluster ZONE=us-east5-b IMAGE=us-docker.pkg.dev/PROJECT/REPO/jaxrl_llm:tpu TPU_TYPE=v6e-16 \
#         launch/gke/xpk.sh grpo-1 --config=configs/grpo.py --config.output_dir=/runs/grpo
#
# The first argument names the workload. SLICES (1) slices run as one; xpk starts them again, up to RESTARTS (10) times,
# and the run goes on from its newest checkpoint. STORAGE names a volume of `xpk storage attach`, which holds the runs.
#
# By itself xpk restarts after codes from 127 alone, but where one process is killed the others end with 1 (2 is an error
# that would come again); and it gives a pod that is to leave 30 seconds, in which a large model is not saved.
set -euo pipefail

: "${CLUSTER:?is the name of the cluster}" "${ZONE:?is its zone}" "${IMAGE:?is what launch/docker/tpu.Dockerfile makes}"
: "${TPU_TYPE:?is the kind of slice, v6e-16 for example}" "${1:?usage: launch/gke/xpk.sh NAME [--config=FILE ...]}"
name=$1
shift

command="python -u -m jaxrl_llm.train"
for argument in "$@"; do
  command+=" $(printf %q "$argument")"
done
storage=() # bash 3.2, which macOS has, takes an empty array for an unset one: hence the + below
if [[ -n ${STORAGE:-} ]]; then
  storage=("--storage=$STORAGE")
fi
exec xpk workload create --workload="$name" --cluster="$CLUSTER" --zone="$ZONE" --tpu-type="$TPU_TYPE" \
  --num-slices="${SLICES:-1}" --max-restarts="${RESTARTS:-10}" --restart-on-exit-codes=1 \
  --termination-grace-period-seconds=600 --docker-image="$IMAGE" ${storage[@]+"${storage[@]}"} \
  --command="$command"
