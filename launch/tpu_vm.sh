#!/usr/bin/env bash
# A run on all hosts of a TPU VM slice, from your own machine:
#
#     TPU=my-v6e-16 ZONE=us-east5-b launch/tpu_vm.sh --config=configs/grpo.py --config.checkpoint.folder=gs://my-bucket/grpo
#
# Every host has this repository in FOLDER (jaxrl_llm, in the home folder) with .venv inside it; docs/scaling.md says how
# they come there. The processes find each other through the slice's metadata. Hosts share no disk: checkpoints go to a
# bucket, and everything else that a run leaves is on the first host.
#
# The run outlives this terminal. To end it with its state saved, send all hosts a signal; the same command goes on then:
#
#     gcloud compute tpus tpu-vm ssh $TPU --zone=$ZONE --worker=all --command="pkill -f jaxrl_llm[.]train"
set -euo pipefail

: "${TPU:?is the name of the TPU VM}" "${ZONE:?is its zone}"
folder=${FOLDER:-jaxrl_llm}

command="cd $(printf %q "$folder") && .venv/bin/python -u -m jaxrl_llm.train"
for argument in "$@"; do
  command+=" $(printf %q "$argument")"
done
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$command"
