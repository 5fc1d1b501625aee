"""`rekindle adapt`: the scripts that it changes, what it reports, and its exit statuses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from repository import SUPPORT

from rekindle.cli.main import main

SCRIPTS = SUPPORT / "adaptable"
NAMES = sorted(each.stem for each in SCRIPTS.glob("*.py") if each.stem != "__init__")

MOST_CHANGED = 10  # lines of a typical script, and of one with a loop over steps

# Of each script: the exit status, and lines of the result.
RESULTS = {
    "ddp_epochs": (
        0,
        "from rekindle.training.torch import DistributedDataParallel as DDP, Session, init",
        '    init(backend="gloo")  # nccl with GPUs',
        '        model=model, optimizer=optimizer, scheduler=scheduler, extra={"scaler": scaler}',
        "        for epoch in session.epochs(args.epochs):",
        "            for i, (inputs, targets) in session.batches(loader, numbered=True):",
        "                with session.step():",
        "                    # A comment at the begin of the body.",
        "            scheduler.step()",
        "            score = session.run(evaluate, model, test_loader)",
        '            print("done on", os.uname().nodename)',
        "    dist.destroy_process_group()",
    ),
    "gpt_loop": (
        0,
        "from torch.distributed import destroy_process_group",
        '    init(backend="gloo")',
        'with Session(model=model, optimizer=optimizer, extra={"scaler": scaler}) as session:',
        "    for step in session.steps(max_iters + 1):",
        "        iter_num = step.number",
        "        with step:",
        '                with session.phase("evaluate"):',
        "    destroy_process_group()",
    ),
    "functions": (
        1,
        "from rekindle.training.torch import DistributedDataParallel, Session, init",
        "    model = DistributedDataParallel(nn.Linear(4, 1))",
        '        extra={"ema": ema} if ema is not None else None,',
        "        for epoch in session.epochs(args.epochs):",
        "            train(session, loader, model, criterion, optimizer, ema, epoch)",
        "            score = session.run(validate, loader, model)",
        "            session.run(dist.barrier)",
        "def train(session, loader, model, criterion, optimizer, ema, epoch):",
        "    bar = tqdm(session.batches(loader, numbered=True), total=len(loader))",
        "        i += 1",
        "        with session.step():",
    ),
    "trainer": (
        0,
        "            model=self.model, optimizer=self.optimizer, scheduler=self.lr_scheduler",
        "            for epoch in session.epochs(epochs):",
        "                epoch += 1",
        "                self._epoch(session, epoch)",
        "            torch.distributed.barrier()",
        "    def _epoch(self, session, epoch):",
        "        for inputs, targets in session.batches(self.loader):",
        "                self._batch(inputs, targets)",
    ),
    "engine": (
        1,
        "    for samples, targets in logger.log_every(session.batches(loader), 10):",
        "            loss_scaler(loss, optimizer, parameters=model.parameters())",
    ),
    "engine_main": (
        1,
        "    init()",
        "        for _ in session.epochs(epochs):",
        "            train_one_epoch(session, model, loader, optimizer, logger, loss_scaler)",
    ),
    "accumulation": (
        1,
        "                loss = model(x).square().mean()",
        "                    optimizer.step()",
        "                print(session.run(evaluate, model))",
        "                model.train()",
    ),
}

# Reports of the scripts above: a line of the script, and a part of the report about it.
REPORTS = {
    "ddp_epochs": (),
    "gpt_loop": (),
    "trainer": (),
    "functions": (
        ("mp.spawn(main_worker", "`rekindle run --nproc-per-node N` starts the ranks"),
        ("model.load_state_dict(", "loads its own checkpoint"),
        ("for epoch in range(args.start", "begins at args.start_epoch"),
        ("best_score = max(", "best_score"),
        ("losses.append(", "losses"),
    ),
    "engine": (
        ("def train_one_epoch", "gets the Session as first argument"),
        ("logger.log_every(", "check: logger.log_every()"),
    ),
    "engine_main": (("    train_one_epoch(", "is in another file"),),
    "accumulation": (
        ("optimizer.step()", "each step needs one update"),
        ("total_loss += ", "total_loss"),
    ),
}

HEAD = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
torch.distributed.init_process_group()
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
UPDATE = "model(x).sum().backward(); opt.step()"

# Loops below HEAD: a line of the loop, a part of the report, and whether the loop changes.
LOOPS = (
    ("for x in loader:\n    if x is None:\n        continue\n    " + UPDATE, "", "", True),
    ("for x in loader: " + UPDATE, "", "", True),
    ("def f():\n  for x in loader:\n    " + UPDATE + "\n    return 1", "return", "`return`", True),
    ("for x in loader:\n    " + UPDATE + "\n    break", "break", "check: `break` ends", True),
    ("for x in zip(loader, b):\n    " + UPDATE, "for x", "zip() in a loop", True),
    ("for _ in range(9):\n    x = next(batches)\n    " + UPDATE, "for _", "next()", False),
    ("for i in range(0, 9, 2):\n    x = get(i)\n    " + UPDATE, "for i", "range with", False),
    ("k = 1\nwhile k <= 9:\n    x = get(k)\n    " + UPDATE + "\n    k += 1", "", "", True),
    (
        "k = old\nwhile k < 9:\n    x = get(k)\n    " + UPDATE + "\n    k += 1",
        "while",
        "begins",
        True,
    ),
    (
        "for x in loader: " + UPDATE + "\nif torch.distributed.is_initialized():\n"
        "    torch.distributed.destroy_process_group()",
        "",
        "",
        True,
    ),
    ("while loss > 1:\n    x = get()\n    " + UPDATE, "while", "no counter", False),
    ("while e < 9:\n  for x in loader:\n    " + UPDATE, "while", "epochs are not", False),
    (
        "for fold in range(3):\n    for e in range(2):\n        for x in loader: " + UPDATE,
        "for fold",
        "a script has one Session",
        True,
    ),
    (
        "def f():\n    for e in range(2):\n        for x in loader: "
        + UPDATE
        + "\nf()\ntorch.distributed.barrier()",
        "barrier",
        "after the end of the Session",
        True,
    ),
    (
        "for e in range(2):\n    for x in loader: " + UPDATE + "\nif main:\n"
        "    torch.distributed.barrier()\n    torch.distributed.destroy_process_group()",
        "if main",
        "ends inside of the Session",
        True,
    ),
    (
        "for x in loader:\n    def closure(): model(x).sum().backward()\n    opt.step(closure)",
        "",
        "",
        True,
    ),
    ("def f(self):\n    for x in loader: " + UPDATE, "def f", "nothing in this file calls", True),
    ("for x in loader:\n    engine.backward(model(x))", "engine", "owns the loop", False),
    (
        "for a in range(2):\n for b in range(3):\n  x = get()\n  " + UPDATE,
        " for b",
        "in another",
        False,
    ),
)


class Done(NamedTuple):
    """The exit status of the command, its output, and the file after it."""

    status: int
    out: str
    err: str
    text: str


Adapt = Callable[..., Done]


@pytest.fixture
def adapt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Adapt:
    """Return a function that writes a script, and runs the command on it."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *options: str) -> Done:
        path = Path("train.py")
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["adapt", str(path), *options])
        output = capfd.readouterr()
        return Done(int(ended.value.code or 0), output.out, output.err, path.read_text())

    return run


def changed_lines(diff: str) -> int:
    """Count the added lines that are not removed with another indentation; no empty lines."""
    lines = diff.splitlines()
    removed = Counter(each[1:].strip() for each in lines if re.match("-(?!-- )", each))
    added = Counter(each[1:].strip() for each in lines if re.match(r"\+(?!\+\+ )", each))
    del added[""]
    return (added - removed).total()


@pytest.mark.parametrize("name", NAMES)
def test_scripts_get_a_session(adapt: Adapt, name: str) -> None:
    """The result has the expected lines, is Python, and a second run does not change it."""
    status, *expected = RESULTS[name]
    done = adapt((SCRIPTS / f"{name}.py").read_text(), "--write")
    assert done.status == status, done.err
    found = done.text.splitlines()
    assert [each for each in expected if each not in found] == []
    compile(done.text, name, "exec")
    again = adapt(done.text, "--write")
    assert (again.status, again.out, again.text) == (0, "", done.text)


@pytest.mark.parametrize("name", NAMES)
def test_reports_have_the_line_of_the_script(adapt: Adapt, name: str) -> None:
    """Each report is about one line, and no other report is printed."""
    text = (SCRIPTS / f"{name}.py").read_text()
    lines = text.splitlines()
    done = adapt(text)
    reports = re.findall(r"train\.py:(\d+): (.*)", done.err)
    assert len(reports) == len(REPORTS[name]), done.err
    for line, part in REPORTS[name]:
        assert any(line in lines[int(number) - 1] and part in words for number, words in reports)


@pytest.mark.parametrize("name", ["ddp_epochs", "gpt_loop"])
def test_typical_scripts_change_in_few_lines(adapt: Adapt, name: str) -> None:
    """A script with validation, scheduler, clipping, AMP and checkpoints gets ten new lines."""
    done = adapt((SCRIPTS / f"{name}.py").read_text())
    assert 5 <= changed_lines(done.out) <= MOST_CHANGED


@pytest.mark.process
def test_patch_applies_the_diff(adapt: Adapt, tmp_path: Path) -> None:
    """`patch` makes the same files as --write, also from a file without a last line break."""
    if shutil.which("patch") is None:
        pytest.skip("this machine has no `patch`")
    for name in NAMES:
        text = (SCRIPTS / f"{name}.py").read_text().rstrip("\n") + "  # the end: \u00fc\x0c"
        done = adapt(text, "--write")
        (tmp_path / "train.py").write_text(text)
        command = ["patch", "--silent", "--strip", "0"]
        subprocess.run(command, input=done.out.encode(), cwd=tmp_path, check=True)
        assert (tmp_path / "train.py").read_text() == done.text


@pytest.mark.parametrize(("loop", "line", "part", "changes"), LOOPS)
def test_loops(adapt: Adapt, loop: str, line: str, part: str, changes: bool) -> None:
    """A loop that does not fit gives a report with its line; only some of them change."""
    text = f"{HEAD}{loop}\n"
    done = adapt(text, "--write")
    assert (done.text != text) == changes, done.err
    compile(done.text, "train.py", "exec")
    if line:
        number = next(i for i, each in enumerate(text.splitlines(), 1) if line in each)
        assert f"train.py:{number}: " in done.err
        assert part in done.err
    else:
        assert (done.status, done.err) == (0, "")


def test_a_body_keeps_its_comments_and_gets_one_block(adapt: Adapt) -> None:
    """Comments, blank lines and odd formatting of a body stay as they are."""
    body = "    # why\n\n    y = [x,\n         x]  # two\n    " + UPDATE + "\n    # last\n"
    done = adapt(f"{HEAD}for x in loader:  # all\n{body}")
    moved = [each[1:] for each in done.out.splitlines() if each.startswith("+")]
    assert "        for x in session.batches(loader):  # all" in moved
    assert "                y = [x," in moved
    assert "                     x]  # two" in moved
    assert "                # last" in moved


def test_line_endings_and_tabs_stay(adapt: Adapt) -> None:
    """A script with tabs, and with line breaks of Windows, keeps them in the added lines."""
    text = f"{HEAD}if True:\n\tfor x in loader:\n\t\tprint(x)\n\t\t{UPDATE}\n"
    path = Path("dos.py")
    path.write_bytes(text.replace("\n", "\r\n").encode())
    with pytest.raises(SystemExit) as ended:
        main(["adapt", str(path), "--write"])
    lines = path.read_bytes().split(b"\r\n")
    assert ended.value.code == 0
    assert b"\n" not in b"".join(lines)
    assert b"\twith Session(model=model, optimizer=opt) as session:" in lines
    assert b"\t\t\t\t\tprint(x)" in lines


def test_the_script_does_not_run(adapt: Adapt) -> None:
    """A script with a side effect at its top is read, and not run or imported."""
    text = f"open('ran', 'w'); import not_there\n{HEAD}for x in loader:\n    {UPDATE}\n"
    assert adapt(text).status == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("for x in loader:\n    print(x)\n", "no training loop"),
        ("def f(:\n", "train.py:1: this is no Python"),
        ("", "no training loop"),
    ],
)
def test_files_without_training_end_with_status_two(adapt: Adapt, text: str, part: str) -> None:
    """A file that trains nothing, or is no Python, gives one line and status 2."""
    done = adapt(text)
    assert (done.status, done.out) == (2, "")
    assert part in done.err
    assert done.err.count("\n") == 1


def test_a_missing_file_ends_with_status_two(capfd: pytest.CaptureFixture[str]) -> None:
    """A path without a file gives one line that names it."""
    with pytest.raises(SystemExit) as ended:
        main(["adapt", "missing.py"])
    assert ended.value.code == 2
    assert "cannot read missing.py: No such file" in capfd.readouterr().err
