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

module load cuda/12.4
module load gcc
. "/home/me/my venv/bin/activate"
export UCX_NET_DEVICES=mlx5_0:1
export NOTE="it's \$5"
ulimit -l unlimited

# Slurm warns this shell, and nobody else, some time before the limit: xgpt then stops in good order
# (exit code 75), and the job goes back to the queue and on from there, at most 5 times. A stop
# that `xgpt stop` asked for (it writes into the file `stop`) ends it.
warned= told= xgpt=
warn() {
    warned=yes
    [ -z "$xgpt" ] || [ -n "$told" ] || { told=yes; kill -USR1 "$xgpt"; }
}
trap warn USR1
"${submit[@]}" &
xgpt=$!
[ -z "$warned" ] || warn
while kill -0 "$xgpt" 2>/dev/null; do wait "$xgpt"; done
wait "$xgpt"
code=$?
if [ -n "$warned" ] && [[ $code = 75 || $code = 138 ]] && [ ! -s "$output/stop" ]; then
    count="$output/slurm-requeued-$SLURM_JOB_ID"
    times=$(cat "$count" 2>/dev/null || echo 0)
    if [ "$times" -lt 5 ]; then
        echo $((times + 1)) > "$count"
        echo "the time limit is near: back to the queue, time $((times + 1)) of 5"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
    echo "the time limit is near: the same \`xgpt submit\` goes on from here"
fi
exit "$code"
