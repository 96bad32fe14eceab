"""Whatever stands in a configuration, on a command line or in a result: one clear refusal, no crash, hang or hunger."""

import io
import json
import math
import resource
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import documents
import pytest
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import batchtune
from batchtune.cli import app
from batchtune.config.load import load_config
from batchtune.config.schema import Config, known_keys
from batchtune.errors import DeviceError, UsageError
from batchtune.processes.local import LocalLauncher
from batchtune.report.formats import FORMATS
from batchtune.report.view.trainers import EXPORTS
from batchtune.result import load_result

MIB = 2**20
MOST_MEMORY_BYTES = 200 * MIB
MOST_SECONDS = 20.0  # of processor time for one input, on a machine that others use as well
TEMPLATE = (Path(batchtune.__file__).parent / "templates" / "config.yaml").read_text(encoding="utf-8")

# Values that mean harm

NUMBERS = [0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.0, -0.0, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf]
TEXTS = ["", "x", ".nan", "1e999", "9" * 5000, "\x00", "\ud800", "\x1b[31m", "[/bold]", "..", "a" * 10_000, "%s{0}"]
TEXTS += ["../../x", "/etc/passwd", "CON", "*a", "&a", "!!python/object/apply:os.abort []", "😀", documents.HOSTILE]
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=4,
)
keys = st.one_of(st.sampled_from(sorted(known_keys())), st.sampled_from(TEXTS), st.text(max_size=10))

# Configurations, more and less like one


def nested(pairs):
    """A document with each value where its dotted key says."""
    document = {"task": "model.py"}
    for dotted, value in pairs:
        *parents, leaf = dotted.split(".")
        section = document
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[leaf] = value
    return document


TOKENS = ["\n", " ", "\t", ":", ": ", "- ", "[", "]", "{", "}", "'", '"', "|", ">", "&a ", "*a", "!!int ", "? ", "#"]
TOKENS += ["---\n", "...\n", "<<: ", "\x00", "\x85", "\ufeff", "\u2028", "é", "1e", "_", "%YAML 9.9\n", "\\x", "\r"]


@st.composite
def torn(draw, text=TEMPLATE):
    """A real document with pieces cut out, doubled, or put where they do not belong."""
    for _ in range(draw(st.integers(1, 5))):
        begin = draw(st.integers(0, len(text)))
        end = min(len(text), begin + draw(st.integers(0, 30)))
        piece = draw(st.sampled_from(["", text[begin:end] * 2, *TOKENS]))
        text = text[:begin] + piece + text[end:]
    return text


SIZE = st.sampled_from([3, 60, 60, 60, 1000, 1000, 1000, 5_000, 20_000, 120_000])
bombs = st.one_of(
    SIZE.map(lambda n: "a: " + "[" * n + "]" * n),
    SIZE.map(lambda n: "a: " + "{b: " * n),
    SIZE.map(lambda n: "".join(f"{' ' * min(depth, 900)}a:\n" for depth in range(min(n, 1000)))),
    SIZE.map(lambda n: "- " * n),
    SIZE.map(lambda n: "a: &a [x]\n" + "".join(f"b{k}: [{'*a,' * 9}]\n" for k in range(n // 30))),
    SIZE.map(lambda n: "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, n // 40))),
    SIZE.map(lambda n: "task: x\n" * (n // 8)),
    SIZE.map(lambda n: "a: [" + "1," * (n // 2) + "]"),
    SIZE.map(lambda n: "a: [" + "[]," * (n // 3) + "]"),
    SIZE.map(lambda n: "task: '" + "x" * n),
    SIZE.map(lambda n: "seed: " + "9" * n),
    SIZE.map(lambda n: "seed: 0x" + "f" * n),
    SIZE.map(lambda n: "".join(f"k{k}: {k}\n" for k in range(n // 10))),
    SIZE.map(lambda n: "\n" * n),
)
written = st.dictionaries(keys, values, max_size=4).map(lambda pairs: yaml.dump(nested(pairs.items())))
encodings = st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1"])
config_files = st.one_of(
    st.binary(max_size=200),
    st.tuples(st.one_of(torn(), written, st.text(), bombs), encodings).map(
        lambda given: given[0].encode(given[1], errors="replace")
    ),
)
overrides = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.tuples(keys, st.one_of(values.map(repr), st.text(max_size=10), torn("[1e-3, {a: 1}]"))).map("=".join),
    ),
    max_size=3,
)

# Results


def places(part, path=()):
    """The path of every value in a document."""
    children = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from places(value, (*path, key))


RESULTS = {name: (json.dumps(made), list(places(made))) for name, made in documents.DOCUMENTS.items()}


@st.composite
def results(draw):
    """A result in which a few values are not what they should be."""
    text, paths = RESULTS[draw(st.sampled_from(sorted(RESULTS)))]
    document = json.loads(text)
    for _ in range(draw(st.integers(0, 3))):
        *parents, last = draw(st.sampled_from(paths))
        section = document
        try:
            for each in parents:
                section = section[each]
            if draw(st.booleans()):
                section[last] = draw(values)
            else:
                del section[last]
        except (KeyError, IndexError, TypeError):  # an earlier change has taken its place away
            continue
    return json.dumps(document).encode()


result_files = st.one_of(
    results(),
    results(),
    results(),
    torn(RESULTS["tune"][0]).map(lambda text: text.encode(errors="replace")),
    st.binary(max_size=99),
)

# Command lines

COMMANDS = typer.main.get_command(app).commands
FLAGS = sorted({flag for command in COMMANDS.values() for option in command.params for flag in option.opts})
words = st.one_of(
    st.sampled_from(
        ["model.py", "config.yaml", "result.json", ".", "nowhere.py", "model.py:x", "os", "seed=1", *FLAGS]
    ),
    st.sampled_from([text for text in TEXTS if "\0" not in text]),
    st.sampled_from(NUMBERS).map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=10),
)
beginnings = [*(name.split() for name in COMMANDS), ["schema", "config"], ["report", "result.json"], ["init", "new"]]
commands = st.tuples(st.sampled_from([*beginnings, ["brew"]]), st.lists(words, max_size=4)).map(
    lambda parts: [*parts[0], *parts[1]]
)

# What must not happen


@contextmanager
def little_memory():
    """For as long as the block runs the process may grow by 200 MB and no more: beyond, Python raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Tally(Counter):
    """Inputs by what became of them, and the most that any one took."""

    seconds = 0.0

    @contextmanager
    def one_more(self):
        """For one input: whatever but a refusal escapes, and so does more time or memory than an input may take."""
        began = time.process_time()
        try:
            with little_memory():
                yield
            self["taken"] += 1
        except UsageError:
            self["refused"] += 1
        self.seconds = max(self.seconds, time.process_time() - began)
        assert time.process_time() - began < MOST_SECONDS


def check_config(folder, tally, content, changes):
    file = folder / "config.yaml"
    file.write_bytes(content)
    with tally.one_more():
        config = load_config(file, changes, environment={})
        again = Config.model_validate(yaml.safe_load(config.to_yaml()))
        assert again == config or config.storage is not None


def check_result(folder, tally, content):
    file = folder / "result.json"
    file.write_bytes(content)
    with tally.one_more():
        result = load_result(file)
        json.loads(result.to_json())
        Console(file=io.StringIO(), width=100).print(result)
        for name, written_as in FORMATS.items():
            if name != "html":
                written_as(result).encode()
        for export in EXPORTS.values():
            try:
                export.text(result, ()).encode()
                export.said_beside(result)
            except UsageError:  # there is no recommendation to export
                continue


def check_page(folder, tally, content):
    file = folder / "result.json"
    file.write_bytes(content)
    with tally.one_more():
        load_result(file).to_html().encode()


def check_command(tally, arguments):
    with tally.one_more():
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code in {0, 2, 5}, (arguments, done.output, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), arguments
        if done.exit_code:
            assert done.stderr.strip()
            raise UsageError("as it says")


# name: (what makes an input, what it is given to, inputs in a short run, in a long one)
KINDS = {
    "configurations": (st.tuples(config_files, st.just([])), check_config, 400, 30_000),
    "key=value arguments": (st.tuples(st.just(TEMPLATE.encode()), overrides), check_config, 100, 10_000),
    "result documents, read and printed": (st.tuples(result_files), check_result, 120, 8_000),
    "result documents, as a page": (st.tuples(result_files), check_page, 20, 500),
    "command lines": (st.tuples(commands), check_command, 150, 4_000),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a task, a configuration and a result, in which no child is ever started."""

    def no_child(self):
        raise DeviceError("no child in this test")

    monkeypatch.setattr(LocalLauncher, "start", no_child)
    monkeypatch.setattr(batchtune.console, "_stop_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("raise AssertionError('never imported')")
    (tmp_path / "config.yaml").write_text("task: model.py\n")
    (tmp_path / "result.json").write_text(RESULTS["tune"][0])
    return tmp_path


def attack(kind, place, count):
    """Gives so many inputs of a kind to what reads them; the tally of what became of them."""
    made, check, _, _ = KINDS[kind]
    tally = Tally()
    (place / "inputs").mkdir()
    arguments = () if check is check_command else (place / "inputs",)

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(made)
    def each(made_of):
        check(*arguments, tally, *made_of)

    each()
    return tally


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_breaks_its_reader(place, kind):
    tally = attack(kind, place, KINDS[kind][2])
    assert tally["refused"] > 0
    assert tally["taken"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_of_very_many_breaks_its_reader(place, kind, survived):
    tally = attack(kind, place, KINDS[kind][3])
    read, refused = tally["taken"], tally["refused"]
    assert read + refused >= 0.9 * KINDS[kind][3]
    survived.take("| kind", kind, f"{read + refused:,}", f"{read:,}", f"{refused:,}", f"{tally.seconds:.1f}")
