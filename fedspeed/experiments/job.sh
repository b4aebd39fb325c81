#!/bin/bash
# Written by `fedspeed slurm`. To submit it: sbatch FILE. A task that was stopped, or failed, continues when it is
# submitted again; tasks that are done end at once.
@directives@

@setup@
set -u
# Every process computes with one thread, so that bits do not depend on the machine; cores are for processes.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
python=@python@
out=@out@
runs=(
@runs@
)
name=${runs[${SLURM_ARRAY_TASK_ID:-0}]}
run=$out/$name

# [ray
# A Ray cluster of this job alone, protected by a token: the head on the first node, where this script runs, and a
# member on each other node. The head's address is the one that the last node sees.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[-1]}" getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')
port=$((20000 + 4 * (SLURM_JOB_ID % 3000)))
address=$head:$port
scratch=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/ray-$SLURM_JOB_ID
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
members=()

member() {
  local node=$1
  shift
  srun --nodes=1 --ntasks=1 --nodelist="$node" "$python" -m ray.scripts.scripts start --block --disable-usage-stats \
    --num-cpus "$SRUN_CPUS_PER_TASK" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --temp-dir "$scratch" "$@" &
  members+=($!)
}

joined() {  # waits for the given number of members; fails if a member ends meanwhile
  "$python" - "$head" "$port" "$1" <<'END' &
import socket, sys, time

host, port, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
end, there = time.monotonic() + 300, 0
while there < wanted:
    try:
        socket.create_connection((host, port), timeout=5).close()
        import ray

        if not ray.is_initialized():
            ray.init(address=f"{host}:{port}", logging_level="error", log_to_driver=False)
        there = sum(node["Alive"] for node in ray.nodes())
    except OSError:
        pass
    if time.monotonic() > end:
        sys.exit(f"slurm: the Ray cluster at {host}:{port} has {there} of {wanted} members after five minutes")
    time.sleep(1)
END
  local watch=$!
  wait -n "$watch" "${members[@]}"
  if kill -0 "$watch" 2>/dev/null; then
    echo "slurm: a member of the Ray cluster could not start; what it said is above"
    kill "$watch"
    return 1
  fi
  wait "$watch"
}

cleanup() {
  kill -TERM "${members[@]}" 2>/dev/null
  wait
  srun --ntasks-per-node=1 rm -rf -- "$scratch"
}
trap cleanup EXIT

member "${nodes[0]}" --head --node-ip-address "$head" --port "$port" --include-dashboard false \
  --dashboard-agent-listen-port $((port + 1))
joined 1 || exit 1
for node in "${nodes[@]:1}"; do
  member "$node" --address "$address" --dashboard-agent-listen-port $((port + 2))
done
joined "${#nodes[@]}" || exit 1
# ray]

saved() {  # the round of the newest checkpoint
  find "$run/checkpoints" -name '*.json' -printf '%f\n' 2>/dev/null | sed 's/[.]json$//' | sort -n | tail -n 1
}

stop() {  # interrupts the run as Ctrl-C does; it keeps its checkpoint
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
child=
again=
task=$SLURM_JOB_ID
# The last task of an array has the number of the whole array.
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
before=$(saved)
trap 'again=yes; stop' USR1  # the time limit is near
trap stop TERM               # the job is cancelled, or preempted: then Slurm itself queues it again

@command@ &
child=$!
while kill -0 "$child" 2>/dev/null; do
  wait "$child"  # returns early on a signal
done
wait "$child"
code=$?
if [ "$again" ] && [ "$code" -ge 128 ]; then  # ended by a signal
  if [ "$(saved)" != "$before" ]; then
    echo "slurm: the time limit is near; the run goes on when the job is queued again"
    scontrol requeue "$task"
  else
    echo "slurm: the time limit is near and no checkpoint was written; not queued again: it needs more --time"
  fi
fi
exit "$code"
