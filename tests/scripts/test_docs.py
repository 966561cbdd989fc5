"""What the documents say must be there: files, anchors, flags, and the example that a test compiles."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "build" / "release" / "apps" / "zorro" / "zorro"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples" / "README.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path from the repository root; the reader fills in names in capitals.
PATH = re.compile(r"`((?:src|include|apps|tests|scripts|examples|docs|bench|cmake)/[\w./-]+)`")
PLACEHOLDER = re.compile(r"(?<![A-Za-z])(NAME|FAMILY|X)(?![A-Za-z])")


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as they are made from the words."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = (document.parent / file).resolve() if file else document
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_paths_exist(document: Path) -> None:
    for path in PATH.findall(document.read_text()):
        if not PLACEHOLDER.search(path):
            assert (ROOT / path).exists(), path


def test_paths_in_public_comments_exist() -> None:
    for header in (ROOT / "include").rglob("*.h"):
        for file, anchor in re.findall(r"(docs/\w+\.md)(?:#([\w-]+))?", header.read_text()):
            assert (ROOT / file).exists(), header
            assert not anchor or anchor in anchors(ROOT / file), (header, anchor)


def commands() -> list[tuple[str, list[str]]]:
    """Every `zorro SUBCOMMAND` of a fenced block with the flags that follow it."""
    found = []
    for document in DOCUMENTS:
        for _, block in FENCE.findall(document.read_text()):
            for name, rest in re.findall(r"^(?:\S*/)?zorro (\w+)(.*)$", block, re.MULTILINE):
                found.append((name, re.findall(r"(?<!\S)(--[a-z][a-z-]*)", rest)))
    return found


def test_flags_exist() -> None:
    written = commands()
    assert len(written) >= 5
    helps: dict[str, str] = {}
    for name, flags in written:
        if name not in helps:
            done = subprocess.run([COMMAND, name, "--help"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, name
            helps[name] = done.stdout
        for flag in flags:
            assert re.search(rf"{flag}\b(?!-)", helps[name]), (name, flag)


def test_the_python_example_runs() -> None:
    (block,) = [
        text for language, text in FENCE.findall((ROOT / "docs" / "python.md").read_text()) if language == "python"
    ]
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([6]) torch.Size([6])\n"


def test_the_example_of_the_readme_is_the_one_that_a_test_compiles() -> None:
    block = next(text for language, text in FENCE.findall((ROOT / "README.md").read_text()) if language == "cpp")
    statements = [re.sub(r"\s*//.*", "", line) for line in block.splitlines()]
    for argument, path in (("argv[1]", '"examples/qwen3-small"'), ("argv[2]", '"examples/rollouts.jsonl.gz"')):
        statements = [line.replace(path, argument) for line in statements]
    consumer = (ROOT / "tests" / "install" / "consumer" / "main.cpp").read_text().splitlines()
    body = [line.strip() for line in consumer]
    for line in filter(None, statements):
        assert line in body, line
