"""The soak's command line; see the package."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from tools.soak import audit, scene
from tools.soak.samples import Samples
from tools.soak.scene import CHAINS, Place
from tools.soak.trouble import VETERANS, Company

_PATIENCE: Final = 300.0
"""Seconds without a step after which a role is taken to be stuck."""
_SETTLE: Final = 300.0


def main() -> int:
    """Run the soak; 1 when something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak")
    parser.add_argument("folder", type=Path, help="made; stays when something was wrong")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-spark", dest="spark", action="store_false")
    parser.add_argument("--disk", type=int, default=2000, metavar="MIB", help="0: never full")
    parser.add_argument("--picture", type=Path, help="an SVG to write")
    options = parser.parse_args()
    place = Place(options.folder)
    place.make()
    disk_mib = options.disk if options.disk and _mount(place.disk, options.disk) else 0
    wrong = _soak(place, options, disk_mib)
    if disk_mib and not wrong:
        subprocess.run(["umount", "--lazy", str(place.disk)], check=True)
    return wrong


def _mount(disk: Path, mib: int) -> bool:
    asked = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(disk)]
    mounted = subprocess.run(asked, capture_output=True, text=True)
    if mounted.returncode:
        print(f"the disk will not be full: {mounted.stderr.strip()}", file=sys.stderr)
    return mounted.returncode == 0


def _names(spark: bool) -> list[str]:
    names = [f"{kind}-{chain}-0" for kind in ("feeder", "biller", "mailer") for chain in CHAINS]
    names += [f"biller-{chain}-1" for chain in CHAINS] + ["mailer-marker-1"]
    names += [f"banker-all-{each}" for each in range(2)]
    names += [f"{kind}-all-0" for kind in ("loader", "keeper", "looker", "auditor")]
    return names + (["spark"] if spark else [])


def _soak(place: Place, options: argparse.Namespace, disk_mib: int) -> int:
    with scene.connect(place) as client:
        scene.build(client, options.spark)
    samples = Samples()
    company = Company(place, _names(options.spark), options.seed, disk_mib)
    try:
        wrong = _endure(place, company, samples, options)
        wrong = wrong or _let_settle(place, company)
    finally:
        company.close()
    for line in samples.lines():
        print(line)
    print(", ".join(f"{n} x {what}" for what, n in sorted(company.happened.items())))
    _tell_tolerated(place)
    for chain in CHAINS:
        ranges = place.acknowledged(chain)
        print(f"{chain}: {sum(b - a + 1 for a, b in ranges):,} numbers in {len(ranges):,} commits")
    if options.picture:
        options.picture.write_text(samples.picture())
    wrong += [] if wrong else samples.growth()
    for problem in wrong:
        print(f"WRONG: {problem}")
    print("nothing was lost, doubled or stuck, and nothing grew" if not wrong else "see above")
    return 1 if wrong else 0


def _endure(
    place: Place, company: Company, samples: Samples, options: argparse.Namespace
) -> list[str]:
    """Let troubles come until the time is over; what was wrong."""
    chance = random.Random(options.seed)
    begun = time.monotonic()
    sampled = 0.0
    while (now := time.monotonic() - begun) < options.seconds:
        time.sleep(chance.expovariate(0.5))
        company.trouble(chance)
        if wrong := _wrong(place, company):
            return wrong
        if now > sampled + options.seconds / 200:
            sampled = now
            samples.store(place.store, now)
            for actor in company.actors:
                if actor.name in VETERANS:
                    samples.process(actor.name, actor.popen.pid, now)
            _show(now, options.seconds)
    return []


def _wrong(place: Place, company: Company) -> list[str]:
    wrong = [f"{file.name}: {file.read_text()}" for file in place.errors.iterdir()]
    wrong += [f"{name} ended by itself" for name in company.ended()]
    return wrong + [f"{name} took no step in {_PATIENCE:.0f} s" for name in company.late(_PATIENCE)]


def _let_settle(place: Place, company: Company) -> list[str]:
    """No more troubles: all that was fed goes all the way, and the store is as it should be."""
    wrong = company.dismiss(("feeder", "banker", "loader", "keeper", "looker"))
    deadline = time.monotonic() + _SETTLE
    with scene.connect(place) as client:
        while (waiting := audit.settled(client, place)) is not None:
            if time.monotonic() > deadline:
                wrong.append(f"{waiting} did not go all the way in {_SETTLE:.0f} s")
                break
            time.sleep(1.0)
        wrong += company.dismiss(("biller", "mailer", "auditor", "spark"))
        wrong += _wrong(place, company) + audit.problems(client, place)
        report = client.check()
        return wrong if report.ok else [*wrong, f"check: {report}"]


def _tell_tolerated(place: Place) -> None:
    if place.tolerated().exists():
        lines = place.tolerated().read_text().splitlines()
        names = Counter(line.split(": ")[1] for line in lines if line.count(": ") > 1)
        print("tolerated: " + ", ".join(f"{n} x {name}" for name, n in names.most_common()))


def _show(now: float, seconds: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{now:.0f} of {seconds:.0f} s", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
