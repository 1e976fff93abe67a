"use strict";
// Everything from the store is put in as text, never as HTML.
const $ = (id) => document.getElementById(id);
const token = document.querySelector("meta[name=token]").content;
const count = (n) => (typeof n === "string" ? BigInt(n) : Math.round(n)).toLocaleString("en"); // Text: it may pass 2^53.
const rate = (n) => `${n.toLocaleString("en", { maximumFractionDigits: n < 10 ? 1 : 0 })}/s`;
const length = (s) => (s == null ? "–" : s < 1 ? `≤ ${+(s * 1e3).toPrecision(3)} ms` : `≤ ${s} s`);
function size(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return unit === "B" ? `${Math.round(n)} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}
function age(s) {
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.onclick = value;
    else if (value != null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
function draw(height, label, shapes) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 1000 ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("height", height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const [name, attributes, title] of shapes) {
    const shape = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    if (title) {
      const text = document.createElementNS(space, "title");
      text.textContent = title;
      shape.append(text);
    }
    svg.append(shape);
  }
  return svg;
}

// -- state, plots, grids --------------------------------------------------------------

const PLOTS = [
  ["commits", "Commits", rate], ["p99", "Commit, 99th percentile", length],
  ["conflicts", "Conflicts", rate], ["lag", "Lag of subscriptions", count],
  ["memory", "In memory", size], ["files", "On disk", size],
];
function plot([name, title, shown], ring) {
  const values = ring.map((each) => each[name]);
  const most = Math.max(...values.map((v) => v ?? 0), 0);
  const first = ring[0].at, span = Math.max(ring.at(-1).at - first, 60);
  let path = "", pen = "M";
  ring.forEach((each, at) => {
    if (at && each.at - ring[at - 1].at > 5) pen = "M"; // Nobody looked in between.
    if (values[at] == null) return void (pen = "M");
    path += `${pen}${((each.at - first) / span) * 1000} ${66 - (most ? values[at] / most : 0) * 60}`;
    pen = "L";
  });
  const last = values.at(-1), label = `${title}: now ${shown(last ?? 0)}, at most ${shown(most)}`;
  const now = last == null ? "–" : shown(last);
  return el("figure", {}, el("figcaption", {}, title, el("b", {}, now)),
    draw(70, label, [["path", { class: "base", d: "M0 66H1000" }], ["path", { class: "line", d: path }]]),
    el("figcaption", {}, el("span", {}, `the last ${age(ring.at(-1).at - first)}`), el("span", {}, `at most ${shown(most).replace("≤ ", "")}`)));
}
function now(view) {
  const r = view.per_second, damaged = Object.values(view.tables).filter((t) => t.rows == null).length
    + Object.values(view.topics).reduce((sum, t) => sum + t.damaged.length, 0);
  const pairs = [
    ["Commits", rate(r.commits)], ["Commit p50", length(view.commit_seconds.p50)],
    ["Commit p99", length(view.commit_seconds.p99)], ["Conflicts", rate(r.conflicts)],
    ["Aborts", rate(r.aborts)], ["Messages sent", rate(r.messages_sent)],
    ["Delivered", rate(r.messages_delivered)], ["Acknowledged", rate(r.messages_acked)],
    ["In memory", size(view.memory_bytes)],
    ["In the log alone", `${count(view.log_commits)}, ${size(view.log_bytes)}`],
    ["Flush lag", age(view.flush_lag_seconds)], ["Flushed rows", rate(r.flushed_rows)],
    ["Compacted rows", rate(r.compacted_rows)], ["Staged", size(view.staged_bytes)],
    ["History back to", view.history ? new Date(view.history).toLocaleTimeString() : "all"],
    ["Oldest snapshot", view.oldest_snapshot
      ? `${age(view.oldest_snapshot.seconds)}, process ${view.oldest_snapshot.pid}` : "none but the latest"],
    ["Failing parts", count(view.failing_parts), view.failing_parts > 0],
    ["Damaged parts", count(damaged), damaged > 0],
  ];
  return pairs.map(([name, value, bad]) =>
    el("div", {}, el("dt", {}, name), el("dd", bad ? { class: "bad" } : {}, bad ? `⚠ ${value}` : value)));
}
const opener = (kind, name) => el("button", { class: "name", "data-key": `${kind} ${name}`, onclick: () => open(kind, name) }, name);
const ender = (id) => token && el("button", {
  class: "danger", "data-key": `abort ${id}`, "aria-label": `Abort transaction ${id}`,
  onclick: () => ask(`Abort transaction ${id}?`,
    `All that it wrote and sent is given up, whichever process began it; what waits for it goes on. This is \`txnkv txn abort\`.`,
    "Abort it", `/abort?of=${id}`),
}, "Abort…");
function grids(view) {
  const made = [
    ["Transactions", "transactions", ["id", "state", "#age", "#of", "locking", "#parts", "holds up", ""],
      view.transactions.map((t) => [`${t.id}`, t.state.toLowerCase().replaceAll("_", " "), age(t.seconds),
        t.timeout == null ? "" : age(t.timeout), t.locking, count(t.participants),
        t.holds_up.join(", "), ender(t.id)])],
    ["Held up", "held_up", ["partition", "#stable to", "#end", "#waiting", "#by transaction"],
      view.held_up.map((h) => [h.partition, count(h.stable), count(h.end), count(h.end - h.stable), `${h.held_up_by}`])],
    ["Subscriptions", "subscriptions", ["topic", "name", "type", "#lag", "#leased", "#free", "#pending"],
      view.subscriptions.map((s) => [s.topic, s.name, s.type, count(s.lag), count(s.leased), count(s.free), count(s.pending)])],
    ["Streams and jobs", "applications", ["application", "#last batch", "#committed ago"],
      view.applications.map((a) => [a.name, count(a.version), age(a.seconds)])],
    ["Tables", "tables", ["table", "#rows", "#size", "#row sets", "#deleted"],
      Object.entries(view.tables).map(([name, t]) => [opener("table", name),
        t.rows == null ? "⚠ damaged" : count(t.rows), size(t.bytes), count(t.row_sets), count(t.deleted_versions)])],
    ["Topics", "topics", ["topic", "#offsets", "#size", "#segments", "#open transactions"],
      Object.entries(view.topics).map(([name, t]) => [opener("topic", name),
        t.damaged.length ? `⚠ damaged: ${t.damaged.join(", ")}` : count(t.offsets),
        size(t.bytes), count(t.segments), count(t.open_transactions)])],
  ];
  return made.map(([title, key, names, rows]) => {
    const more = view.counts[key] - rows.length;
    return el("section", { "aria-label": title }, el("h2", {}, `${title} (${count(view.counts[key])})`),
      rows.length ? grid(names, rows, title) : el("p", { class: "note" }, "none"),
      more > 0 ? el("p", { class: "note" }, `and ${count(more)} more`) : "");
  });
}
function grid(names, rows, title) {
  const kind = (name) => (name.startsWith("#") ? { class: "n" } : {}), bare = (name) => name.replace("#", "");
  // The roles are said since cards, which they are where it is narrow, have none of their own.
  return el("div", { class: "wide" }, el("table", { role: "table", "aria-label": title },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" },
      ...names.map((n) => el("th", { role: "columnheader", scope: "col", ...kind(n) }, bare(n))))),
    el("tbody", { role: "rowgroup" }, ...rows.map((row) => el("tr", { role: "row" },
      ...row.map((cell, at) => el("td", { role: "cell", ...kind(names[at]), "data-of": bare(names[at]) }, cell || "")))))));
}
function show(view, ring) {
  $("path").textContent = document.title = view.path;
  const leader = view.leader_pid == null ? "no leader" : `leader ${view.leader_pid}`;
  $("about").textContent = `${new Date().toLocaleTimeString()} · ${size(view.files_bytes)} on disk · `
    + `${view.processes.length} writing · ${leader}`;
  $("now").replaceChildren(...now(view));
  $("plots").replaceChildren(...PLOTS.map((each) => plot(each, ring)));
  anew($("grids"), grids(view));
}
function anew(place, parts) { // What is drawn anew keeps the focus, and how far it is scrolled.
  const key = document.activeElement?.dataset?.key, wide = () => [...place.querySelectorAll(".wide")];
  const at = new Map(wide().map((each) => [each.firstChild.ariaLabel, [each.scrollLeft, each.scrollTop]]));
  place.replaceChildren(...parts);
  for (const each of wide()) each.scrollTo(...(at.get(each.firstChild.ariaLabel) ?? [0, 0]));
  if (key) [...document.querySelectorAll("[data-key]")].find((b) => b.dataset.key === key)?.focus({ preventScroll: true });
}

// -- drawings -------------------------------------------------------------------------

function table(found) {
  const parts = [grid(["column", "type", "key"], found.columns.map(([name, type]) =>
    [name, type, found.primary_key.includes(name) ? "primary" : ""]), "Columns")];
  parts.push(el("h3", {}, "Indexes"), found.indexes.length
    ? grid(["columns", "unique", "ready"], found.indexes.map((i) =>
      [i.columns.join(", "), i.unique ? "yes" : "no", i.ready ? "yes" : "being built"]), "Indexes")
    : el("p", { class: "note" }, "none"));
  found.damaged = shown?.tables[opened?.name]?.rows === null; // Somewhere: each says what it lost.
  for (const tablet of found.tablets) {
    const sets = tablet.row_sets, shapes = [];
    sets.forEach((s, at) => {
      const wide = 1000 / Math.max(tablet.ends, 1), x = s.from * wide, w = (s.to - s.from + 1) * wide;
      const dead = s.rows ? (s.deleted / s.rows) * w : 0, y = at * 14;
      shapes.push(["rect", { class: "bar", x, y, width: w, height: 10 }, `row set ${s.id}: ${s.first} to ${s.last}`]);
      if (dead) shapes.push(["rect", { class: "dead", x: x + w - dead, y, width: dead, height: 10 }, `${count(s.deleted)} deleted`]);
      if (s.versioned) shapes.push(["rect", { class: "several", x, y: y + 10, width: w, height: 2 }, "several versions of rows"]);
    });
    parts.push(el("h3", {}, `Tablet ${tablet.id}`));
    if (found.damaged || tablet.error) parts.push(...damage(tablet));
    if (tablet.error) continue;
    if (!sets.length) parts.push(el("p", { class: "note" }, "no row sets yet: its rows are in the log and in memory"));
    else parts.push(el("p", { class: "note" }, "Ranges of keys, in their order; the other part of a bar is deleted rows, a line below it several versions of rows."),
      draw(sets.length * 14, `Key ranges of ${sets.length} row sets, as in the grid below`, shapes),
      grid(["row set", "first key", "last key", "#rows", "#deleted", "versions", "#size"], sets.map((s) =>
        [`${s.id}`, s.first, s.last, count(s.rows), count(s.deleted), s.versioned ? "several" : "one", size(s.bytes)]), `Row sets of tablet ${tablet.id}`));
    if (tablet.count > sets.length) parts.push(el("p", { class: "note" }, `and ${count(tablet.count - sets.length)} more`));
  }
  return parts;
}
function damage(part) {
  return [el("p", {}, part.error ? `⚠ damaged: ${part.error}` : "⚠ this table is damaged, here or in another tablet"),
    token ? el("p", {}, el("button", { class: "danger", "data-key": `repair ${part.part}`, "aria-label": `Repair ${part.part}`, onclick: () => repair(part.part) }, "Repair…")) : ""];
}
const many = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`;
function line(p, low, high, label, zoomed) {
  const at = (offset) => ((Math.min(Math.max(offset, low), high) - low) / Math.max(high - low, 1)) * 1000;
  const rect = (name, from, to, y, height, title) => ["rect", { class: name, x: at(from), y, width: Math.max(at(to) - at(from), 0), height }, title];
  const tick = (name, offset, from, to, title) => ["path", { class: name, d: `M${at(offset)} ${from}V${to}` }, title];
  const shapes = [rect("ground", low, high, 12, 16), rect("bar", p.start, p.stable, 12, 16, "decided"),
    rect("dead", p.stable, p.end, 12, 16, "waiting"),
    ...p.segments.filter(([base]) => base >= low && base < high).map(([base, bytes]) => tick("cut", base, 12, 28, `segment from ${base}, ${size(bytes)}`))];
  if (zoomed) shapes.push(
    ...p.aborted.map((t) => rect("gone", t.first, t.marker + 1, 12, 16, `aborted: transaction ${t.id}, from ${t.first} to its marker at ${t.marker}`)),
    ...p.committed.map((t) => tick("done", t.marker, 30, 38, `committed: transaction ${t.id}, from ${t.first} to its marker at ${t.marker}`)),
    ...p.aborted.map((t) => tick("undone", t.marker, 30, 38, `abort marker of transaction ${t.id} at ${t.marker}`)));
  shapes.push(...p.open.filter((t) => t.first >= low && t.first <= high).map((t) => tick("edge", t.first, 6, 28, `open: transaction ${t.id} from ${t.first}`)),
    ["path", { class: "stable", d: `M${at(p.stable) - 8} 0h16l-8 10z` }, `last stable offset ${p.stable}`]);
  return draw(40, label, shapes);
}
function topic(found) {
  const parts = [];
  for (const p of found.partitions) {
    parts.push(el("h3", {}, `Partition ${p.number}`));
    if (p.error) { parts.push(...damage(p)); continue; }
    const from = Math.min(p.start, ...p.segments.map((s) => s[0]));
    const held = p.open.length && p.stable < p.end ? `, held up by transaction ${p.open[0].id}` : "";
    parts.push(el("p", {}, `offsets ${count(p.start)} to ${count(p.end)} (high watermark); `
      + `last stable offset ${count(p.stable)}${held}; ${many(p.segments.length, "segment")}, ${size(p.bytes)}`
      + (p.waiting ? `; ${many(p.waiting, "message")} in side logs` : "")));
    const whole = from >= p.low && p.end <= p.high;
    const ends = `${many(p.committed.length, "commit marker")}, ${many(p.aborted.length, "aborted transaction")}, ${p.open.length} open`;
    if (!whole) parts.push(line(p, from, p.end, `Offsets ${from} to ${p.end}, stable to ${p.stable}`, false),
      el("p", { class: "note" }, `of these, ${count(p.low)} to ${count(p.high)}, around the last stable offset:`));
    parts.push(line(p, p.low, p.high, `Offsets ${p.low} to ${p.high}, stable to ${p.stable}: ${ends}`, true), el("p", { class: "note" }, ends));
    if (p.open.length) parts.push(grid(["transaction", "#first offset"], p.open.map((t) => [`${t.id}`, count(t.first)]), "Open transactions"));
  }
  const key = (name, text) => el("span", {}, el("i", { class: `key ${name}` }), text);
  parts.push(el("p", { class: "note keys" }, key("bar", "decided"), key("dead", "waits for an open transaction"), key("gone", "aborted, to its marker"),
    key("done", "commit marker"), key("undone", "abort marker"), key("edge", "first message of an open transaction"), key("stable", "last stable offset"), key("cut", "gap: a segment begins")));
  return parts;
}
let opened = null;
async function open(kind, name) {
  opened = { kind, name };
  $("drawing").replaceChildren(); // Another is seen from its top.
  $("h-detail").textContent = `${kind === "table" ? "Table" : "Topic"} ${name}`;
  $("detail").hidden = false;
  await redraw();
  $("detail").focus();
  $("detail").scrollIntoView();
}
async function redraw() {
  const asked = opened;
  if (!asked) return;
  const answer = await fetch(`/${asked.kind}?of=${encodeURIComponent(asked.name)}`).catch(() => null);
  const found = answer ? await answer.json() : { error: "the server does not answer" };
  if (asked !== opened) return; // Another was opened meanwhile, or it was shut.
  anew($("drawing"), found.error ? [el("p", {}, `⚠ ${found.error}`)] : { table, topic }[asked.kind](found));
}

// -- actions --------------------------------------------------------------------------

async function act(title, url) {
  said(`${title} …`);
  try {
    const answer = await fetch(url, { method: "POST", headers: { "X-Token": token } });
    const text = await answer.text();
    if (answer.ok) return JSON.parse(text);
    said(answer.status === 400 ? `⚠ ${JSON.parse(text).error}` : `⚠ refused: ${text}`);
  } catch { said("⚠ the server does not answer; look whether it was done"); }
  return null;
}
function ask(title, why, yes, url) {
  $("h-ask").textContent = title;
  $("why").textContent = why;
  $("yes").textContent = yes;
  $("yes").onclick = async () => {
    $("ask").close();
    const done = await act(title, url);
    if (done != null) said(done);
  };
  $("ask").showModal();
}
async function repair(part) {
  const of = `?of=${encodeURIComponent(part)}`, found = await act(`Looking at what ${part} has lost`, `/lost${of}`);
  if (!found) return;
  $("said").hidden = true;
  ask(`Repair ${part}?`, found.any ? `This is lost for good then; if there is a backup, restore it instead:\n${found.lines.join("\n")}`
    : found.lines.join("\n"), found.any ? "Give it up" : "Repair it", `/repair${of}`);
}
function said(text) { $("said").hidden = false; $("said").textContent = text; }

// -- each second ----------------------------------------------------------------------

let ring = [], paused = false, shown = null;
async function tick() {
  if (!paused && !document.hidden) {
    try {
      const { view, ring: fresh, error } = await (await fetch(`/state?of=${ring.at(-1)?.at ?? 0}`)).json();
      ring = ring.concat(fresh).slice(-900);
      shown = view;
      if (ring.length && view.path) show(view, ring);
      await redraw();
      alert(error && `⚠ ${error}`);
    } catch { alert("⚠ The server does not answer: what is shown is old. Start `txnkv ui` again."); }
  }
  setTimeout(tick, 1000);
}
function alert(text) {
  if ($("alert").textContent !== (text || "")) $("alert").textContent = text || "";
  $("alert").hidden = !text;
}
$("pause").onclick = () => {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", paused);
};
$("shut").onclick = () => {
  const key = opened && `${opened.kind} ${opened.name}`;
  opened = null;
  $("detail").hidden = true;
  [...document.querySelectorAll("[data-key]")].find((b) => b.dataset.key === key)?.focus(); // Back to where it was opened.
};
$("find").onsubmit = async (event) => {
  event.preventDefault();
  const name = $("name").value;
  const answer = await fetch(`/find?of=${encodeURIComponent(name)}`).catch(() => null);
  if (!answer?.ok) return void said("⚠ the server does not answer");
  const { kind } = await answer.json();
  if (kind) return void ($("said").hidden = true, open(kind, name));
  said(`⚠ no table or topic has the name “${name}”`);
};
$("no").onclick = () => $("ask").close();
$("compact").hidden = !token;
$("compact").onclick = () => ask("Compact the store?", "Row sets are merged, what nobody can see any more is left out, space is given "
  + "back. Others may read and write meanwhile; it may take long. This is `txnkv compact`.", "Compact it", "/compact");
tick();
