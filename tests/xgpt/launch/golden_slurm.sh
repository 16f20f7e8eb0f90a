#!/bin/bash
#SBATCH --job-name="two jobs"
#SBATCH --chdir="/out/a b"
#SBATCH --output="/out/a b/slurm-%A_%a.log"
#SBATCH --open-mode=append
#SBATCH --array=0-1%1
#SBATCH --signal=B:USR1@300
#SBATCH --partition=gpu
#SBATCH --account=007
#SBATCH --qos=high
#SBATCH --constraint="a40&nvme"
#SBATCH --reservation=maintenance
#SBATCH --dependency=afterok:12:13
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=a40:4
#SBATCH --mem=200G
#SBATCH --time=02:00:00
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --comment="two words"
#SBATCH --nice

case $SLURM_ARRAY_TASK_ID in
0)
    output="/out/a b"
    submit=(/venv/bin/python -P -m xgpt.cli.main submit /jobs/a.yaml)
    ;;
1)
    output=/out/50%
    submit=(/venv/bin/python -P -m xgpt.cli.main submit "/jobs/it's.yaml" --set run.seed=1 --set constraint.latency_s=inf)
    ;;
esac

failed() {  # what fails here ends the job
    local code=$? line=${BASH_LINENO[0]}
    [ ${#FUNCNAME[@]} -eq 2 ] || return 0
    echo "xgpt: the job ends, since line $line of slurm.sh failed with code $code:" >&2
    sed -n "$line{s/^ */    /;p}" "$0" >&2
    exit 1
}
load_module() {
    local said code=0
    said=$(mktemp) && module load "$1" 2> "$said" || code=$?
    cat "$said" >&2
    ! grep -q "ERROR:" "$said" && rm "$said" && return "$code"
}
trap failed ERR
load_module cuda/12.4
load_module gcc
. "/home/me/my venv/bin/activate"
export UCX_NET_DEVICES=mlx5_0:1
export NOTE="it's \$5"
ulimit -l unlimited
trap - ERR
set +eu +o pipefail

# Slurm warns only this shell before the time limit. Then xgpt stops in good order (exit code 75).
# The job is requeued at most 5 times. It ends if `xgpt stop` asked for the stop (by the file `stop`),
# or if 2 allocations in a row added no answer.

warned= told= xgpt=
warn() {
    warned=yes
    [ -z "$xgpt" ] || [ -n "$told" ] || { told=yes; kill -USR1 "$xgpt"; }
}
trap warn USR1
answers() { wc -c "$output/results.jsonl" "$output/held.jsonl" 2>/dev/null | tail -n 1; }
before=$(answers)

"${submit[@]}" &
xgpt=$!
[ -z "$warned" ] || warn
while kill -0 "$xgpt" 2>/dev/null; do wait "$xgpt"; done
wait "$xgpt"
code=$?

if [ -n "$warned" ] && [[ $code = 75 || $code = 138 ]] && [ ! -s "$output/stop" ]; then
    count="$output/slurm-requeued-$SLURM_JOB_ID"
    times=0 idle=0
    [ ! -s "$count" ] || read -r times idle < "$count"
    if [ "$(answers)" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
    if [ "$idle" -ge 2 ]; then
        echo "xgpt: 2 allocations in a row added no answer: not requeued. See above what took their time, or give slurm.time more"
        exit 1
    fi
    if [ "$times" -lt 5 ]; then
        echo "$((times + 1)) $idle" > "$count"
        echo "the time limit is near: back to the queue, time $((times + 1)) of 5"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
    echo "the time limit is near: the same \`xgpt submit\` goes on from here"
fi
exit "$code"
