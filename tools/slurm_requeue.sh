#!/usr/bin/env bash
# In a Slurm job's batch script: runs a command on each of the job's nodes, once, and has the job queued again when the command
# was stopped ahead of the time limit and is not done.
#
#   #SBATCH --signal=TERM@300 --requeue --open-mode=append
#   tools/slurm_requeue.sh tools/switch_topology.sh --run-dir runs/loop ... -- ... -- ...
#
# Slurm sends SIGTERM to the command on every node, --signal's seconds before the limit. A command that has saved then and wants to go
# on ends with status 75, as tools/switch_topology.sh does; the same job goes on from there once Slurm has room for it. 0 ends
# the job, and anything else ends it as failed. The command finds NODE_RANK and NNODES, and the first node in MASTER_ADDR.
#
# Switchers watch each other and end together, so srun is not to kill the others when one has ended.
set -uo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || { echo "slurm_requeue: not within a Slurm job" >&2; exit 2; }
[ $# -gt 0 ] || { echo "slurm_requeue: no command given" >&2; exit 2; }
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR NNODES=$SLURM_NNODES
echo "slurm_requeue: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"
status=0
# shellcheck disable=SC2016  # expanded on each node
srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' loop "$@" || status=$?
if [ "$status" -eq 75 ]; then
    echo "slurm_requeue: stopped ahead of the time limit: job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    sleep 60  # Slurm ends this script
fi
exit "$status"
