#!/usr/bin/env bash
# All that is worth measuring in minutes on one accelerator, on a machine without network.
#
#   bash benchmarks/gpu/one_call.sh [MINUTES] [PART ...]      default: 9, ceilings ours trainer bare
#
# Before: `python -m benchmarks.gpu.pack` fills the folder `carried`. Bring it, and this checkout.
# After: every file in `out` is whole at any time; a call that is cut off loses the step it is in.
#
#   OUT=folder      where results go                    CARRIED=folder   what pack filled
#   PYTHON=python3  has torch with its CUDA parts       REHEARSE=1       tiny, on a CPU
#
# Parts: ceilings (what products, copies and attention reach here), ours, trainer, bare (llama2-7b,
# 16 sequences a step, compiled; the last two as they come as well), fp8 (llama3-8b), limit (what
# fits, what is tight, and what is out of memory on purpose, beside the plan), saving (llama-1b, a
# save every 10 steps), turns (llama-1b: settings against each other in one process), images
# (ResNet-50 and EfficientNet-B7 beside a plain loop).
# Exit code: 0, or 1 where the tiny run failed: mend it here, and give the machine back meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."

minutes=${1:-9}
shift || true
parts=${*:-ceilings ours trainer bare}
python=${PYTHON:-python3}
carried=$(realpath -m "${CARRIED:-carried}")
out=$(realpath -m "${OUT:-out}")
until=$((SECONDS + minutes * 60 - 10)) # the last seconds bring the files back
for part in $parts; do
  case $part in ceilings | ours | trainer | bare | fp8 | limit | saving | turns | images) ;; *)
    echo "$part is no part. There are: ceilings, ours, trainer, bare, fp8, limit, saving, turns," \
      "images." >&2
    exit 2
    ;;
  esac
done
mkdir -p "$out/compiled"

# 1. what this machine lacks: wheels, unpacked beside it and not into it
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$carried/wheels/*.whl" >/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --target "$site" "$carried"/wheels/*.whl
fi
export PYTHONPATH="$PWD/src:$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"

# 2. surroundings: no network but this machine's own, memory without gaps, compiled code kept
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1
export PYTORCH_ALLOC_CONF=expandable_segments:True
export TORCHINDUCTOR_CACHE_DIR="$site/inductor" # many small files: they come back as few large ones
if compgen -G "$carried/compiled/*.bin" >/dev/null; then
  cp -n "$carried"/compiled/*.bin "$out/compiled/"
fi

data=$(compgen -G "$carried/prepared/*/manifest.json" | head -n 1 || true)
run=("$python" -m benchmarks.gpu.run --out "$out" --compiled "$out/compiled")
[ -z "$data" ] || run+=(--data "$(dirname "$data")")
ceilings=("$python" -m benchmarks.gpu.ceilings --out "$out")
images=("$python" -m benchmarks.gpu.images --out "$out")
if [ -n "${REHEARSE:-}" ]; then
  run+=(--rehearse)
  ceilings+=(--rehearse)
  images+=(--rehearse)
  export TORCHDYNAMO_DISABLE=1 # compiling for a CPU takes minutes of two cores
fi

left() { echo $((until - SECONDS)); }

# Measure cells while there is time. A part that fails says so in its file and in the log, and the
# next one begins: it may be the one that was asked for.
measure() {
  local name=$1 seconds=$2
  shift 2
  [ "$seconds" -le "$(left)" ] || seconds=$(left)
  if [ "$seconds" -lt "${LEAST:-60}" ]; then
    echo "$name: not begun, $seconds s are left" | tee -a "$out/log.txt" >&2
    return 0
  fi
  echo "$name: up to $seconds s" | tee -a "$out/log.txt" >&2
  timeout --kill-after=10 $((seconds + 60)) "${run[@]}" --name "$name" \
    --seconds "$seconds" "$@" 2>&1 | tee -a "$out/log.txt" || echo "$name failed" >&2
}

# 3. versions, and three steps of a tiny model through the product's own loop: 20 s
if ! timeout 120 "${run[@]}" --tiny --name tiny --seconds 60 --least-seconds 5 --contenders shardyard \
  --recompute none --steps 3 --warm-up 2 2>&1 | tee -a "$out/log.txt"; then
  echo "The tiny run failed, so nothing else was begun. $out/log.txt has the reason." >&2
  exit 1
fi

# 4. the parts, in the order that they were named
seven=(--models llama2-7b --sequences 16 --steps 8 --warm-up 3)
[ -z "${REHEARSE:-}" ] || seven=(--sequences 4 --steps 3 --warm-up 2 --least-seconds 5)
for part in $parts; do
  case $part in
  ceilings) # the real shapes, 10 s each
    timeout --kill-after=10 "$(($(left) > 0 ? $(left) : 1))" "${ceilings[@]}" 2>&1 |
      tee -a "$out/log.txt" || echo "ceilings failed" >&2
    ;;
  images)
    timeout --kill-after=10 "$(($(left) > 0 ? $(left) : 1))" "${images[@]}" 2>&1 |
      tee -a "$out/log.txt" || echo "images failed" >&2
    ;;
  ours) # without recompute; what is out of memory goes on with selective
    measure ours 350 "${seven[@]}" --contenders shardyard --compile yes --reference \
      --recompute none selective --first-that-fits --profile
    ;;
  trainer | bare)
    measure "$part" 280 "${seven[@]}" --contenders "$part" --compile no yes \
      --recompute none full --first-that-fits
    ;;
  limit)
    if [ -n "${REHEARSE:-}" ]; then
      echo "limit: left out, a CPU has none" | tee -a "$out/log.txt" >&2
    else
      measure limit 200 --limit --steps 3 --warm-up 2
    fi
    ;;
  saving) # 13 GiB of states, written to this machine's own disk
    saving=(--models llama-1b --steps 40 --warm-up 3 --compile yes)
    every=10
    [ -z "${REHEARSE:-}" ] || { saving=("${seven[@]}" --steps 6) && every=2; }
    measure saving 200 "${saving[@]}" --contenders shardyard --recompute none selective \
      --first-that-fits --settings "checkpoint.every=$every"
    ;;
  turns) # what differs by a percent is told by turns alone
    turns=(--models llama-1b --steps 8 --warm-up 3)
    [ -z "${REHEARSE:-}" ] || turns=("${seven[@]}")
    measure turns 350 "${turns[@]}" --by-turns 3
    ;;
  fp8) # all blocks, moments in bf16: fp32 states and a copy in bf16 would fill 139 GB alone
    fp8=(--models llama3-8b --sequences 16 --steps 8 --warm-up 3)
    format=fp8
    [ -z "${REHEARSE:-}" ] || { fp8=("${seven[@]}") && format=bf16; } # no CPU multiplies fp8
    measure fp8 350 "${fp8[@]}" --contenders shardyard --compile yes --recompute selective --reference \
      --settings "precision.compute=$format" precision.optimizer_states=bf16
    ;;
  esac
done
echo "results: $out" >&2
