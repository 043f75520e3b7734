#!/usr/bin/env bash
# All runs of docs/vision.md, most important first. Interrupt it and start it again: finished rows are kept.
#   experiments/vision/run.sh DATA [OUT]
# DATA holds deit_tiny_patch16_224.safetensors, imagenet_val_1000/ and imagenet_val_1000_labels.json.
set -euo pipefail
data=$1
out=${2:-experiments/vision}
threads=${THREADS:-2}
limit=${LIMIT:-1000}  # images of the 197-token grid

study() { # FOLDER ARGUMENTS...
    local folder=$1
    shift
    prescore vision --model "$data/deit_tiny_patch16_224.safetensors" --images "$data/imagenet_val_1000" \
        --batch-size 25 --threads "$threads" --resume --out "$out/$folder" "$@"
}
heavy() { # FOLDER ARGUMENTS...
    local folder=$1
    shift
    prescore paper appendix-g --model "$data/deit_tiny_patch16_224.safetensors" --images "$data/imagenet_val_1000" \
        --batch-size 25 --threads "$threads" --resume --out "$out/$folder" "$@"
}

rows=(--samples 32 --samples 64 --samples 96 --samples 128)
baselines=(--method random --method leverage --method key-norm --method key-diff)
rules=(--method kmeans --method kmeans-farthest-sample --method kmeans-cluster-share --method kmeans-balanced --method kmedian)
ours=(--method key-diff+centroids --method centroids)

# heavy-entry coverage
heavy coverage --limit 20 --seeds 3
# the paper's grid
study "grid-$limit" "${rows[@]}" --limit "$limit" --method exact "${baselines[@]}" "${rules[@]}" "${ours[@]}"
study "grid-$limit" "${rows[@]}" --limit "$limit" --prefix free --method exact "${baselines[@]}" "${rules[@]}" "${ours[@]}"
study "grid-$limit" "${rows[@]}" --limit "$limit" --prefix both --clusters 6 --method exact "${rules[@]}"
study "grid-$limit" "${rows[@]}" --limit "$limit" --seeds 3 --method exact --method random --method kmeans-farthest-sample
# the rule of the published script
study "grid-$limit" "${rows[@]}" --limit "$limit" --method exact --method published
# the spread over seeds
study seeds-100 --limit 100 --clusters 4 --samples 32 --samples 64 --samples 128 --seeds 3 --method random --method published
# how long attention takes: nothing else may run
study times --limit 100 --samples 32 --samples 64 --samples 128 --method exact --method centroids --method kmeans --method leverage --method random
