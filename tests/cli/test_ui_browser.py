"""`txnkv ui` as a person has it: in a browser, wide and narrow, light and dark, with a pointer."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import txnkv
from tests import browser, internals
from txnkv.topics import outbox

pytest.importorskip("starlette", reason="needs txnkv[ui]")
pytest.importorskip("uvicorn", reason="needs txnkv[ui]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.MISSING is not None, reason=f"{browser.MISSING}"),
]

SVG = "return document.querySelectorAll('#drawing svg .' + arguments[0]).length"
OVERFLOW = """
    const edge = document.documentElement.clientWidth + 1;
    return [...document.querySelectorAll('body *')]
        .filter((each) => !each.closest('.wide, thead'))
        .filter((each) => each.getBoundingClientRect().right > edge)
        .map((each) => each.outerHTML.slice(0, 80));"""
"""What sticks out."""
FAINT = """
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const part = (n) => n / 255 <= 0.03928 ? n / 255 / 12.92 : ((n / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    const color = (each) => numbers(getComputedStyle(each).color);
    const ground = (each) => {
        for (; each; each = each.parentElement) {
            const found = numbers(getComputedStyle(each).backgroundColor);
            if (found[3] !== 0) return found;
        }
        return [255, 255, 255];
    };
    const faint = (each) => {
        const two = [light(color(each)), light(ground(each))].sort((a, b) => a - b);
        return (two[1] + 0.05) / (two[0] + 0.05) < 4.5;
    };
    const words = (each) => [...each.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    return [...document.querySelectorAll('body *')]
        .filter((each) => words(each) && each.checkVisibility() && faint(each))
        .map((each) => each.outerHTML.slice(0, 80));"""
"""Texts of less contrast than WCAG's AA asks for."""


@pytest.fixture
def held(store, monkeypatch):
    """Committed, aborted and open transactions in a topic, and a table with deleted rows."""
    with txnkv.connect(store) as client:
        table = client.create_table("orders", txnkv.Schema({"id": "int64"}, ["id"]))
        events = client.create_topic("events")
        events.subscribe("mailer").close()
        with client.transaction() as txn:
            for number in range(9):
                txn.insert(table, (number,))
            txn.mark_applied("daily", 17)
        internals.flush(client)
        with client.transaction() as txn:
            txn.delete(table, 1)
        internals.flush(client)
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "MAX_BYTES", -1)  # into the log at once, and an end marker
            for end in ("commit", "rollback", "commit"):
                txn = client.new_transaction()
                txn.send(events, b"sent")
                txn.flush()
                getattr(txn, end)()
            holder = client.new_transaction(timeout=3600)
            holder.send(events, b"held")
            holder.flush()
        with client.transaction() as txn:
            txn.send(events, b"behind")
        yield holder
        holder.rollback()


def started(store):
    """The server and its address."""
    args = [sys.executable, "-m", "txnkv", "ui", str(store)]
    server = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return server, server.stdout.readline().split()[-1]


def ended(server):
    os.kill(server.pid, signal.SIGINT)
    assert server.communicate(timeout=120)[1] == "stopped\n"
    assert server.returncode == 130


@pytest.fixture
def address(store):
    server, found = started(store)
    yield found
    ended(server)


@pytest.fixture
def page(tmp_path):
    with browser.Browser(tmp_path) as it:
        yield it
        # A server may end before the page.
        assert [each for each in it.complaints() if "CONNECTION_REFUSED" not in each] == []


def seen(page, address, width, scheme):
    """Open the page, and wait until it shows the store."""
    page.show(address, width, scheme)
    page.wait("return document.querySelectorAll('#plots figure').length === 6")


TABLE = """
    const set = {id: 1, from: 0, to: 1, first: '0', last: '1', rows: 2, deleted: 0, bytes: 1};
    const sets = [{...set, versioned: arguments[0]}];
    const tablet = {id: 1, part: 'table:t/0', ends: 2, count: 1, error: null, row_sets: sets};
    const found = {columns: [], primary_key: [], indexes: [], tablets: [tablet]};
    return table(found).filter((part) => part.querySelector?.('.several')).length"""


def test_row_sets_with_several_versions_have_a_line(store, address, page):
    seen(page, address, 400, "light")
    assert page.run(TABLE, True) == 1
    assert page.run(TABLE, False) == 0


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_is_there_and_nothing_sticks_out_or_is_faint(held, address, page, width, scheme):
    seen(page, address, width, scheme)
    assert "mailer" in page.text("[aria-label=Subscriptions]")
    streams = page.text("[aria-label='Streams and jobs']")
    assert "daily" in streams
    assert "17" in streams
    page.click("[data-key='topic events']")
    page.wait(SVG, "done")
    # Two committed with a marker each, one aborted, one open, and the last stable offset.
    for name, count in (("done", 2), ("gone", 1), ("undone", 1), ("edge", 1), ("stable", 1)):
        assert page.run(SVG, name) == count, name
    drawn = page.run("return document.querySelector('#drawing svg').ariaLabel")
    assert drawn.startswith("Offsets 0 to ")
    assert drawn.endswith("stable to 6: 2 commit markers, 1 aborted transaction, 1 open")
    # The mark of an offset at the end is not cut off.
    assert page.run("return getComputedStyle(document.querySelector('svg')).overflow") == "visible"
    wide = page.run("return document.querySelector('#drawing .gone').getBoundingClientRect().width")
    assert wide > 4
    page.click("[data-key='table orders']")
    page.wait("return document.querySelector('#h-detail').innerText === 'Table orders'")
    page.wait(SVG, "bar")
    assert page.run(SVG, "dead") == 1
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run(OVERFLOW) == []
    assert page.run(FAINT) == []
    back = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    picture = page.screenshot()
    assert struct.unpack(">I", picture[16:20])[0] in range(width - 20, width + 1)


def test_a_transaction_is_aborted_when_asked_twice(held, address, page):
    seen(page, address, 400, "dark")
    button = f"[data-key='abort {held.id.local}']"
    page.click(button)
    assert f"Abort transaction {held.id.local}?" in page.text("#ask")
    page.click("#no")
    assert held.state.name == "OPEN"
    page.click(button)
    page.click("#yes")
    page.wait("return document.querySelector('#said').innerText.includes(arguments[0])",
              f"transaction {held.id.local} is ABORTED")  # fmt: skip
    page.wait("return !document.querySelector(arguments[0])", button)
    page.wait(
        "return document.querySelector(\"[aria-label='Held up']\").innerText.includes('none')"
    )
    page.click("#compact")
    page.click("#yes")
    page.wait("return document.querySelector('#said').innerText.startsWith('merged')")
    page.click("#pause")
    assert page.run("return document.querySelector('#pause').ariaPressed") == "true"


def test_plots_go_on_when_the_server_was_ended(store, held, page):
    server, address = started(store)
    seen(page, address, 1400, "light")
    before = page.wait("return ring.length > 2 && ring.map((each) => each.at)")
    ended(server)
    page.wait("return !document.querySelector('#alert').hidden")
    assert "Start `txnkv ui` again" in page.text("#alert")
    server, address = started(store)
    try:
        seen(page, address, 1400, "light")
        assert page.run("return ring.map((each) => each.at)")[: len(before)] == before
    finally:
        ended(server)


def test_a_damaged_part_is_repaired_when_asked_twice(store, page):
    with txnkv.connect(store) as client:
        events = client.create_topic("events")
        for number in range(3):
            with client.transaction() as txn:
                txn.send(events, b"%d" % number)
        client.compact()
        partition = client.instance.topics.partitions(client.instance.topics.get("events"))[0]
        file = Path(partition.environment.path) / "data.mdb"
    file.write_bytes(bytes(file.stat().st_size))
    server, address = started(store)
    try:
        seen(page, address, 400, "light")
        assert "damaged: 0" in page.text("[aria-label=Topics]")
        page.click("[data-key='topic events']")
        page.wait("return document.querySelector('#drawing .danger')")
        page.click("#drawing .danger")
        page.wait("return document.querySelector('#ask').open")
        assert page.text("#why").endswith("\ntopic 'events', partition 0: offsets 0 to 2")
        page.click("#yes")
        page.wait("return document.querySelector('#said').innerText.includes('works again')")
        page.wait("return !document.querySelector('#drawing .danger')")
        page.wait("return document.querySelector('#alert').hidden")
    finally:
        ended(server)


def test_one_of_a_thousand_tables_is_found(store, page):
    with txnkv.connect(store) as client:
        for number in range(1000):
            client.create_table(f"table_{number:04}", txnkv.Schema({"id": "int64"}, ["id"]))
        last = client.table("table_0999")
        last.insert((1,))
    server, address = started(store)
    try:
        seen(page, address, 1400, "light")
        assert "Tables (1,000)" in page.text("[aria-label=Tables] h2")
        assert "and 700 more" in page.text("[aria-label=Tables] .note")
        assert page.run("return document.documentElement.scrollHeight") < 3000
        begin = "const begin = performance.now(); "
        assert page.run(f"{begin} show(shown, ring); return performance.now() - begin") < 500
        page.run("document.querySelector('#name').value = 'table_0999'")
        page.click("#find button")
        page.wait("return document.querySelector('#h-detail').innerText === 'Table table_0999'")
        page.run("document.querySelector('#name').value = 'none'")
        page.click("#find button")
        page.wait("return document.querySelector('#said').innerText.includes('no table or topic')")
        assert page.complaints() == []
    finally:
        ended(server)


def test_what_is_open_stays_where_it_was_scrolled_to(store, page):
    """The columns of a table began at the top each second."""
    with txnkv.connect(store) as client:
        kinds = {"id": "int64", **{f"column_{i:02}": "int64?" for i in range(80)}}
        for name in ("wide", " wide"):
            client.create_table(name, txnkv.Schema(kinds, ["id"]))
        client.create_topic("events")
        with client.transaction() as txn:
            txn.mark_applied("daily", (1 << 53) + 1)
    server, address = started(store)
    place = "document.querySelector('#drawing .wide')"
    try:
        seen(page, address, 1400, "light")
        assert "9,007,199,254,740,993" in page.text("[aria-label='Streams and jobs']")
        for name in ("wide", " wide"):
            page.run("document.querySelector('#name').value = arguments[0]", name)
            page.click("#find button")
            page.wait("return document.querySelector('#h-detail').textContent === arguments[0]",
                      f"Table {name}")  # fmt: skip
            page.wait(f"return {place}")
            assert page.run(f"return {place}.scrollTop") == 0
            page.run(f"{place}.scrollTop = 500; {place}.id = 'before'")
            page.wait(f"return {place}.id === ''")
            assert page.run(f"return {place}.scrollTop") == 500
        page.run("document.querySelector('#name').value = 'events'")
        page.click("#find button")
        page.wait("return document.querySelector('#h-detail').textContent === 'Topic events'")
    finally:
        ended(server)
