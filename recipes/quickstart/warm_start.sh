# Functions for scripts that train on the quickstart's task. SEED (0) and OUTPUT (runs/quickstart) come from the
# environment; OUTPUT/seedSEED has the data and the warm start.
# shellcheck source=recipes/install.sh
source "$(dirname "${BASH_SOURCE[0]}")/../install.sh"

# train_ppo, train_grpo FOLDER SETTINGS...: trains the model after the warm start. Without the setting `output`, the run
# writes to the first of FOLDER, FOLDER2, ... that does not exist.
train_ppo() {
    _prepare_model
    exec python -m recipes.ppo.train recipes/quickstart/ppo.yaml output="$(next_folder "$1")" "${_common[@]}" \
        critic.model.path="$_task/sft/model" "${@:2}"
}

train_grpo() {
    train_on_prompts grpo "$@"
}

# train_on_prompts RECIPE FOLDER SETTINGS...: trains the actor of RECIPE after the warm start. FOLDER is as in
# train_ppo.
train_on_prompts() {
    _prepare_model
    exec python -m "recipes.$1.train" "recipes/$1/arithmetic.yaml" output="$(next_folder "$2")" "${_common[@]}" "${@:3}"
}

# distill FOLDER SETTINGS...: trains a teacher on more examples than the warm start, and distills it into the model of
# the warm start. FOLDER is as in train_ppo.
distill() {
    _prepare_model
    train_teacher "$_task" "$_seed"
    exec python -m recipes.distillation.train recipes/distillation/arithmetic.yaml output="$(next_folder "$1")" \
        "${_common[@]}" teacher.model.path="$_task/teacher/model" "${@:2}"
}

# train_detached NAME PLACEMENT SETTINGS...: trains with GRPO, schedule async and placement/detached_PLACEMENT.yaml on
# CPU devices. The run writes to runs/detached_NAME, as in train_ppo.
train_detached() {
    train_grpo "runs/detached_$1" placement="detached_$2" placement.device=cpu schedule.kind=async "${@:3}"
}

# train_on_pairs RECIPE FOLDER ROLE SETTINGS...: trains ROLE of RECIPE on preference pairs, after the warm start. FOLDER
# is as in train_ppo.
train_on_pairs() {
    enter_repository
    _set_task
    warm_start "$_task" "$_seed"
    python -m recipes.quickstart.pairs --data "$_task/data" --seed "$_seed"
    exec python -m "recipes.$1.train" "recipes/$1/arithmetic.yaml" output="$(next_folder "$2")" seed="$_seed" \
        "$3.model.path=$_task/sft/model" data.train="$_task/data/pairs.jsonl" data.test="$_task/data/pairs_test.jsonl" \
        "${@:4}"
}

# train_sft FOLDER SETTINGS...: fine-tunes the untrained model. FOLDER is as in train_ppo.
train_sft() {
    enter_repository
    _set_task
    python -m recipes.quickstart.prepare --output "$_task/data" --seed "$_seed"
    exec python -m recipes.sft.train recipes/quickstart/sft.yaml output="$(next_folder "$1")" seed="$_seed" \
        actor.model.path="$_task/data/model" data.train="$_task/data/sft.jsonl" "${@:2}"
}

_set_task() {
    _seed=${SEED:-0}
    _task=${OUTPUT:-runs/quickstart}/seed$_seed
}

_prepare_model() {
    enter_repository
    _set_task
    warm_start "$_task" "$_seed"
    _common=(seed="$_seed" actor.model.path="$_task/sft/model")
    _common+=(data.train="$_task/data/train.jsonl" data.test="$_task/data/test.jsonl")
}

# next_folder FOLDER: prints FOLDER, or the first of FOLDER2, FOLDER3, ... that does not exist.
next_folder() {
    local folder=$1 number
    for ((number = 2; ; number++)); do
        [[ -e $folder ]] || break
        folder=$1$number
    done
    echo "$folder"
}

# warm_start FOLDER SEED: creates FOLDER/data (prompts, examples, an untrained model) and FOLDER/sft/model (the model
# after supervised fine-tuning), unless they exist. Both depend only on the seed.
warm_start() {
    python -m recipes.quickstart.prepare --output "$1/data" --seed "$2"
    _fine_tune "$1" "$2" sft data.train="$1/data/sft.jsonl"
}

# train_teacher FOLDER SEED: creates FOLDER/teacher/model, which is trained on three times as many examples as the warm
# start, unless it exists. FOLDER/data must exist.
train_teacher() {
    python -m recipes.quickstart.pairs --data "$1/data" --seed "$2"
    _fine_tune "$1" "$2" teacher steps=700 data.train="[{path: $1/data/sft.jsonl}, {path: $1/data/pairs.jsonl}]"
}

# _fine_tune FOLDER SEED NAME SETTINGS...: creates FOLDER/NAME/model by supervised fine-tuning of FOLDER/data/model,
# unless it exists.
_fine_tune() {
    fine_tune recipes/quickstart/sft.yaml "$1/$3" "$2" actor.model.path="$1/data/model" "${@:4}"
}

# fine_tune CONFIG FOLDER SEED SETTINGS...: creates FOLDER/model by supervised fine-tuning, unless it exists.
fine_tune() {
    if ! grep -qs '"interrupted_by": null' "$2/summary.json"; then
        # Removes the results of an interrupted run.
        rm -rf "${2:?}"
        python -m recipes.sft.train "$1" output="$2" seed="$3" "${@:4}"
    fi
}
