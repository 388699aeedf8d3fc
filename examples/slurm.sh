#!/bin/bash
#SBATCH --job-name=pipesched
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
# Usage: sbatch examples/slurm.sh [arguments of examples/train_gpt.py]
#        sbatch --signal=TERM@60 --export=ALL,SCRIPT=examples/train_hf.py examples/slurm.sh --replicas 2 --zero 2
# Starts one torchrun on each node, with RANKS_PER_NODE processes (default: 1). All processes form one pipeline, or
# several with --replicas. With the second command, Slurm sends SIGTERM a minute before the time limit, and the training
# script then saves and stops. Submit the job again to continue.
# The repository and its environment must have the same path on every node.
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-1}
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# If nodes have several networks, choose one for gloo and NCCL here. pipesched's own sockets use the network that
# leads to the first host.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export OMP_NUM_THREADS=1

srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc_per_node "$ranks_per_node" \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$first_host:${PORT:-29500}" \
    "${SCRIPT:-examples/train_gpt.py}" "$@"
