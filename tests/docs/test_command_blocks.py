"""Every command block in README and docs does what the page says, or says why it is not run."""

from __future__ import annotations

import pytest

from tests.docs.blocks import CodeBlock, Shell, bare_fences, blocks, fences

ALL = list(blocks())
RUN = [block for block in ALL if "not run" not in block.notes]


def test_no_block_is_overlooked() -> None:
    assert len(ALL) == fences()


def test_every_fence_names_its_language() -> None:
    assert bare_fences() == []


def test_notes_are_those_that_mean_something() -> None:
    for block in ALL:
        assert set(block.notes) <= {"not run", "in", "exit"}, block.id


def test_pages_name_no_other_language_for_commands() -> None:
    assert {block.kind for block in ALL} <= {"sh", "console"}


@pytest.mark.parametrize("block", [b for b in RUN if b.kind == "sh"], ids=lambda b: b.id)
def test_commands_end_as_the_page_says(block: CodeBlock, shell: Shell) -> None:
    for line in block.text.splitlines():
        done = shell(line, block.vllm)
        assert done.returncode == block.exit, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("block", [b for b in RUN if b.kind == "console"], ids=lambda b: b.id)
def test_output_is_that_on_the_page(block: CodeBlock, shell: Shell) -> None:
    command, _, output = block.text.partition("\n")
    done = shell(command.removeprefix("$ "), block.vllm)
    assert done.returncode == block.exit, done.stderr
    assert done.stdout == output
