#!/bin/bash
#SBATCH --job-name=pipesched
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
# One torchrun a node, which starts RANKS_PER_NODE processes there: sbatch examples/slurm.sh [arguments of the program]
# A node needs the repository and its environment at the same path. --nodes x RANKS_PER_NODE ranks are one pipeline.
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-1}
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Where a node has several networks, gloo and NCCL are told which one; pipesched's own sockets use the one on the way
# to the first host.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export OMP_NUM_THREADS=1

srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc_per_node "$ranks_per_node" \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$first_host:${PORT:-29500}" \
    examples/train_gpt.py "$@"
