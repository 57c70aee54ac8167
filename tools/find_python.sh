# shellcheck shell=bash disable=SC2154  # program and the others are set by those that source it
# Finds an interpreter, and says which folders an environment may be made in; for tools/setup_env.sh and tools/setup_vllm.sh, which source it.
#
#   program=setup_env python_version=3.12 named_python=$LONGSTRAW_PYTHON named_by=LONGSTRAW_PYTHON
#   root=... venv=... stamp=... kept_by=LONGSTRAW_VENV          for environments, beside those
#   . tools/find_python.sh
#   python=$(find_python)
#
# It looks on PATH, under pyenv and through uv, which may install one. A named interpreter is the only one looked at.

say() { printf '%s: %s\n' "$program" "$*"; }
fail() { printf '%s: %s\n' "$program" "$*" >&2; exit 1; }

make_scratch() {
    scratch=$(mktemp -d)
    trap 'rm -rf -- "$scratch"' EXIT
}

# Prints the interpreter behind $1 if it is of the version and can make an environment; else notes why not. The base
# interpreter is what counts: $1 may be a version manager's shim, which exists whether or not it can run, or the python
# of the very environment that is about to be replaced.
try_python() {
    local found
    found=$("$1" -I -c 'import sys
wanted = tuple(map(int, sys.argv[1].split(".")))
if sys.version_info[:2] != wanted: sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, ssl, venv
except ImportError as error: sys.exit("lacks %s (on Debian: apt install python%d.%d-venv)" % (error.name, *wanted))
print(getattr(sys, "_base_executable", None) or sys.executable)' "$python_version" 2>"$scratch/why") \
        && [ -x "$found" ] && { printf '%s\n' "$found"; return 0; }
    printf '  %s %s\n' "$1" "$(tail -n 1 "$scratch/why")" >>"$scratch/rejected"
    return 1
}

list_pyenv_pythons() {
    local pyenv_root
    for pyenv_root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$HOME/.pyenv"; do
        [ -n "$pyenv_root" ] || continue
        printf '%s\n' "$pyenv_root"/versions/"$python_version"*/bin/python"$python_version"
    done | sort -V -r -u
}

find_uv() {
    local candidate
    for candidate in "$(type -P uv || true)" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        [ -n "$candidate" ] && [ -x "$candidate" ] && { printf '%s\n' "$candidate"; return 0; }
    done
    return 1
}

find_python() {
    local candidate uv
    if [ -n "$named_python" ]; then
        try_python "$named_python" && return 0
        fail "$named_by is set to an interpreter that cannot be used:
$(cat "$scratch/rejected")"
    fi
    while IFS= read -r candidate; do
        [ -x "$candidate" ] && try_python "$candidate" && return 0
    done < <({ type -aP "python$python_version" python3 python || true; } | awk '!seen[$0]++'; list_pyenv_pythons)
    if uv=$(find_uv); then
        # --system, and from /: never the environment of some folder that this script happens to be called from.
        candidate=$(cd / && "$uv" python find --system "$python_version" 2>/dev/null) && try_python "$candidate" && return 0
        say "no Python $python_version on this machine: asking uv to install one" >&2
        (cd / && "$uv" python install "$python_version" >&2) \
            && candidate=$(cd / && "$uv" python find --system "$python_version") && try_python "$candidate" && return 0
    fi
    touch "$scratch/rejected"
    fail "no usable Python $python_version was found on PATH, under pyenv or through uv. Install one, or name one by
$named_by=/path/to/python$python_version. Looked at:
$(cat "$scratch/rejected")"
}

# The checkout that an environment was made for, or nothing where no such script made it. The stamp is there once it is whole.
owner_of_environment() {
    local stamped
    if [ -f "$venv/longstraw-owner" ]; then
        cat -- "$venv/longstraw-owner"
    elif [ -f "$stamp" ]; then
        stamped=$(cut -d ' ' -f 2- "$stamp")
        printf '%s\n' "${stamped% "$venv"}"
    fi
}

# Ends unless the folder $venv may be changed and removed: it is not there, or empty, or in this checkout, or made by such a
# script, and where an environment serves its own checkout only ("alone"), not for another one that is still there.
claim_folder() {
    local owner
    { [ -e "$venv" ] || [ -L "$venv" ]; } || return 0
    case $venv in "$root"/?*) return 0 ;; esac
    [ -d "$venv" ] && [ -z "$(ls -A -- "$venv")" ] && return 0
    owner=$(owner_of_environment)
    [ -n "$owner" ] || fail "$venv is there already and was not made by this script, so nothing in it is touched: let $kept_by name a
folder that is not there yet."
    [ "${1:-}" != alone ] || [ "$owner" = "$root" ] || [ ! -d "$owner" ] \
        || fail "$venv is the environment of $owner, so nothing in it is touched: let $kept_by name another folder for $root."
}

# Makes an empty environment at $venv with the interpreter $1.
start_environment() {
    rm -rf -- "$venv"
    "$1" -I -m venv "$venv"
    printf '%s\n' "$root" >"$venv/longstraw-owner"
}

# Waits until no other set-up of the environment $1 runs, and keeps others waiting until this process ends.
lock_environment() {
    type -P flock >/dev/null || fail "the command flock (package util-linux) is needed"
    mkdir -p -- "$(dirname -- "$1")"
    exec 9>"$1.lock"
    if ! flock -n 9; then
        say "another set-up of $1 is running: waiting for it"
        flock 9
    fi
}
