"""Fuzz what strangers hand in, for so many minutes of processor time; every failure ends it with exit code 1.

    python release/fuzz.py files --minutes 30
    python release/fuzz.py native --minutes 30

`files` changes the headers of good files, guided by coverage of the reader (`pip install atheris`). Checksums are made
right again, so that the reader goes on behind them. `native` calls the C library, compiled with AddressSanitizer and
UndefinedBehaviorSanitizer, with random layers and wrong arguments: the property tests of tests/test_native.py, with new
seeds. Inputs that fail are written into build/fuzz.
"""

import argparse
import logging
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build" / "fuzz"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"


def processor_minutes() -> float:
    """Return what this process and those that it has waited for have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) / 60


def native(minutes: float, seed: int) -> None:
    """Run the property tests with one seed after the other."""
    HOME.mkdir(parents=True, exist_ok=True)
    compiler = HOME / "cc"
    compiler.write_text(f'#!/bin/sh\nexec gcc {SANITIZE} "$@" -O1\n')
    compiler.chmod(0o755)
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "CC": str(compiler),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=1",
        "XDG_CACHE_HOME": str(HOME / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    pytest = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", "tests/test_native.py"]
    rounds = 0
    while processor_minutes() < minutes:
        words = [*pytest, "-m", "hypothesis", "--hypothesis-profile=attack", f"--hypothesis-seed={seed + rounds}"]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"seed {seed + rounds}: {done.stdout[-5000:]}{done.stderr[-5000:]}")
        rounds += 1
        print(
            f"{processor_minutes():.0f} minutes: seed {seed + rounds - 1}, {done.stdout.splitlines()[-1]}", flush=True
        )


def files(minutes: float, seed: int) -> None:
    """Change the headers of good files, and read them."""
    import atheris

    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    with atheris.instrument_imports(include=["plures"]):
        import plures
        import plures.methods.orthogonal_dropout.method
        import plures.storage
    import torch

    from attack.forgery import Forgery
    from attack.subjects import IMAGES, check_sentence, network, save_all
    from plures.files import sealed

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folder = Path(tempfile.mkdtemp())
    save_all(folder)
    good = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))
    corpus = HOME / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    words = set()
    for number, path in enumerate(good):
        document = Forgery(path).document
        text = plures.storage.json.dumps({name: one for name, one in document.items() if name != "checksums"})
        (corpus / f"{number}").write_bytes(bytes([number]) + text.encode())
        words |= {word for word in text.replace(":", ",").split(",") if len(word) < 40 and '"' in word}
    (HOME / "words").write_text("\n".join(f'"{_escaped(word.strip())}"' for word in sorted(words)))
    counts = {"refused": 0, "loaded": 0}
    path = folder / "fuzzed"

    def try_one(data: bytes) -> None:
        subject = Forgery(good[data[0] % len(good)] if data else good[0])
        text = data[1:].decode(errors="surrogateescape")
        try:
            document = plures.storage.json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):  # with true checksums
            subject.document = document
        else:
            subject.metadata = {"plures": sealed(data[1:].decode(errors="replace"))}
        path.write_bytes(subject.file())
        try:
            ensemble = plures.load(path, network())
            repr(ensemble)
            if ensemble.trained:
                ensemble(IMAGES)
            counts["loaded"] += 1
        except plures.PluresError as error:
            check_sentence(error)
            counts["refused"] += 1
        if processor_minutes() >= minutes:
            print(f"{processor_minutes():.0f} minutes: {counts}", flush=True)
            os._exit(0)

    limits = ["-rss_limit_mb=6000", "-timeout=3600", "-max_len=8000", f"-seed={seed}", f"-dict={HOME / 'words'}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={HOME}/", str(corpus)], try_one)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("files", "native"))
    parser.add_argument("--minutes", type=float, default=30, help="of processor time")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    (files if chosen.part == "files" else native)(chosen.minutes, chosen.seed)
