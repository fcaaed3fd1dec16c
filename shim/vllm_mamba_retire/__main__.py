"""``python -m vllm_mamba_retire``: the command ``vllm-mamba-retire`` of this interpreter."""

from vllm_mamba_retire.cli import main

if __name__ == "__main__":
    main()
