# Sourced by scripts that train on the quickstart's task, from the top of the repository. Defines two functions.

# next_folder FOLDER: prints FOLDER, or the first of FOLDER2, FOLDER3, ... that is free: every run has a folder of its own.
next_folder() {
    local folder=$1 number
    for ((number = 2; ; number++)); do
        [[ -e $folder ]] || break
        folder=$1$number
    done
    echo "$folder"
}

# warm_start FOLDER SEED: afterwards FOLDER has data/ (prompts, examples, an untrained model) and sft/model, the model after
# supervised fine-tuning. A seed's are the same every time, so those that are there are used.
warm_start() {
    local folder=$1 seed=$2
    python -m recipes.quickstart.prepare --output "$folder/data" --seed "$seed"
    if ! grep -qs '"interrupted_by": null' "$folder/sft/summary.json"; then
        # What an interrupted warm start left is of no use.
        rm -rf "$folder/sft"
        python -m recipes.sft.train recipes/quickstart/sft.yaml output="$folder/sft" seed="$seed" \
            model.path="$folder/data/model" data.train="$folder/data/sft.jsonl"
    fi
}
