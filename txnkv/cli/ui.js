"use strict";
// Everything from the store is put in as text, never as HTML.
const $ = (id) => document.getElementById(id);
const token = document.querySelector("meta[name=token]").content;
const count = (n) => Math.round(n).toLocaleString("en");
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
  const key = document.activeElement?.dataset?.key; // What is drawn anew keeps the focus.
  $("now").replaceChildren(...now(view));
  $("plots").replaceChildren(...PLOTS.map((each) => plot(each, ring)));
  $("grids").replaceChildren(...grids(view));
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
  for (const tablet of found.tablets) {
    const sets = tablet.row_sets, shapes = [];
    sets.forEach((s, at) => {
      const wide = 1000 / Math.max(tablet.ends, 1), x = s.from * wide, w = (s.to - s.from + 1) * wide;
      const dead = s.rows ? (s.deleted / s.rows) * w : 0, y = at * 14;
      shapes.push(["rect", { class: "bar", x, y, width: w, height: 10 }, `row set ${s.id}: ${s.first} to ${s.last}`]);
      if (dead) shapes.push(["rect", { class: "dead", x: x + w - dead, y, width: dead, height: 10 }, `${count(s.deleted)} deleted`]);
    });
    parts.push(el("h3", {}, `Tablet ${tablet.id}`));
    if (!sets.length) parts.push(el("p", { class: "note" }, "no row sets yet: its rows are in the log and in memory"));
    else parts.push(el("p", { class: "note" }, "Ranges of keys, in their order; the other part of a bar is deleted rows."),
      draw(sets.length * 14, `Key ranges of ${sets.length} row sets, as in the grid below`, shapes),
      grid(["row set", "first key", "last key", "#rows", "#deleted", "versions", "#size"], sets.map((s) =>
        [`${s.id}`, s.first, s.last, count(s.rows), count(s.deleted), s.versioned ? "several" : "one", size(s.bytes)]), "Row sets"));
    if (tablet.count > sets.length) parts.push(el("p", { class: "note" }, `and ${count(tablet.count - sets.length)} more`));
  }
  return parts;
}
function topic(found) {
  const parts = [];
  for (const p of found.partitions) {
    parts.push(el("h3", {}, `Partition ${p.number}`));
    if (p.error) { parts.push(el("p", {}, `⚠ damaged: ${p.error}`)); continue; }
    const from = Math.min(p.start, ...p.segments.map((s) => s[0])), span = Math.max(p.end - from, 1);
    const at = (offset) => ((offset - from) / span) * 1000;
    const shapes = [
      ["rect", { class: "ground", x: 0, y: 6, width: 1000, height: 18 }],
      ["rect", { class: "bar", x: at(p.start), y: 6, width: at(p.stable) - at(p.start), height: 18 }, "decided"],
      ["rect", { class: "dead", x: at(p.stable), y: 6, width: at(p.end) - at(p.stable), height: 18 }, "waiting"],
      ...p.segments.map(([base, bytes]) => ["path", { class: "cut", d: `M${at(base)} 6V24` }, `segment from ${base}, ${size(bytes)}`]),
      ...p.open.map((t) => ["path", { class: "edge", d: `M${at(t.first)} 0V30` }, `transaction ${t.id} from ${t.first}`]),
    ];
    const held = p.open.length && p.stable < p.end ? `, held up by transaction ${p.open[0].id}` : "";
    parts.push(el("p", {}, `offsets ${count(p.start)} to ${count(p.end)} (high watermark); `
      + `last stable offset ${count(p.stable)}${held}; ${count(p.segments.length)} segment${p.segments.length === 1 ? "" : "s"}, ${size(p.bytes)}`
      + (p.waiting ? `; ${count(p.waiting)} messages wait in side logs` : "")),
    draw(30, `Offsets ${p.start} to ${p.end}, stable to ${p.stable}`, shapes));
    if (p.open.length) parts.push(grid(["transaction", "#first offset"], p.open.map((t) => [`${t.id}`, count(t.first)]), "Open transactions"));
  }
  parts.push(el("p", { class: "note" }, "A bar is all offsets: first those that are decided, then those that readers of committed "
    + "messages wait for. Thin gaps part segments; a tall line is the first message of an open transaction."));
  return parts;
}
let opened = null;
async function open(kind, name) {
  opened = { kind, name };
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
  $("drawing").replaceChildren(...(found.error ? [el("p", {}, `⚠ ${found.error}`)] : { table, topic }[asked.kind](found)));
}

// -- actions --------------------------------------------------------------------------

function ask(title, why, yes, url) {
  $("h-ask").textContent = title;
  $("why").textContent = why;
  $("yes").textContent = yes;
  $("yes").onclick = async () => {
    $("ask").close();
    said(`${title} …`);
    try {
      const answer = await fetch(url, { method: "POST", headers: { "X-Token": token } });
      const text = await answer.text();
      said(answer.ok ? JSON.parse(text) : answer.status === 400 ? `⚠ ${JSON.parse(text).error}` : `⚠ refused: ${text}`);
    } catch { said("⚠ the server does not answer; look whether it was done"); }
  };
  $("ask").showModal();
}
function said(text) { $("said").hidden = false; $("said").textContent = text; }

// -- each second ----------------------------------------------------------------------

let ring = [], paused = false;
async function tick() {
  if (!paused && !document.hidden) {
    try {
      const { view, ring: fresh, error } = await (await fetch(`/state?of=${ring.at(-1)?.at ?? 0}`)).json();
      ring = ring.concat(fresh).slice(-900);
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
$("shut").onclick = () => { opened = null; $("detail").hidden = true; };
$("no").onclick = () => $("ask").close();
$("compact").hidden = !token;
$("compact").onclick = () => ask("Compact the store?", "Row sets are merged, what nobody can see any more is left out, space is given "
  + "back. Others may read and write meanwhile; it may take long. This is `txnkv compact`.", "Compact it", "/compact");
tick();
