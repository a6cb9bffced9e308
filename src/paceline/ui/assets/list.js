// The list of runs, drawn from pushed updates; selection, folds and filter survive every redraw.
const body = document.getElementById("runs");
const table = document.getElementById("table");
const empty = document.getElementById("empty");
const filter = document.getElementById("filter");
const compare = document.getElementById("compare");
const count = document.getElementById("count");
const more = document.getElementById("more");
// Selection, folds and filter are restored after navigating back.
const before = history.state || {};
const selected = new Set(before.selected);
const folded = new Map(before.folded); // Name of a study -> whether the user closed it.
const rows = new Map(); // Name -> the current row, and the data that it shows.
const MAX_ROWS = 2000;
const MAX_COMPARED = 24;
const MAX_OPEN_CELLS = 24; // A study with more is initially closed.
let entries = null;
filter.value = before.filter || "";

const seconds = (value) => {
  if (!value) return ""; // Nothing was measured.
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} us`;
  if (value < 1) return `${(value * 1e3).toFixed(2)} ms`;
  return value < 600 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`;
};

// The accuracy, or the loss of a task without one.
const learned = (entry) => {
  if (entry.accuracy !== null) return `${(100 * entry.accuracy).toFixed(1)}%`;
  return entry.test_loss === null ? "" : `loss ${Number(entry.test_loss.toPrecision(3))}`;
};

const ago = (moment) => {
  const passed = Date.now() / 1000 - moment;
  if (passed < 90) return "just now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return new Date(moment * 1000).toLocaleDateString();
};

const link = (kind, name) => `/${kind}/${name.split("/").map(encodeURIComponent).join("/")}`;

function element(kind, attributes, ...inside) {
  const made = document.createElement(kind);
  Object.assign(made, attributes);
  made.append(...inside);
  return made;
}

const anchor = (href, text) => element("a", { href }, text);

function cell(row, content, kind) {
  const made = row.insertCell();
  if (kind) made.className = kind;
  made.append(content);
  return made;
}

function tick(entry) {
  const box = element("input", {
    type: "checkbox",
    checked: selected.has(entry.name),
    disabled: entry.status === "damaged",
    ariaLabel: `compare ${entry.name}`,
  });
  box.addEventListener("change", () => {
    if (box.checked) selected.add(entry.name);
    else selected.delete(entry.name);
    showCompare();
  });
  return box;
}

function fold(group) {
  const made = element("button", { type: "button", className: "fold", ariaExpanded: String(!group.isClosed) });
  made.ariaLabel = `cells of ${group.entry.name}`;
  made.addEventListener("click", () => {
    folded.set(group.entry.name, !group.isClosed);
    draw();
  });
  return made;
}

// The row above a cell names its study.
const shortName = (entry) => {
  if (entry.name === ".") return document.querySelector("h1").textContent;
  return entry.study ? entry.name.split("/").pop() : entry.name;
};

function nameOf(entry, group) {
  const parts = [];
  if (group && group.cells.length) parts.push(fold(group));
  const target = link(entry.kind === "study" ? "report" : "run", entry.name);
  parts.push(entry.status === "damaged" ? shortName(entry) : anchor(target, shortName(entry)));
  if (entry.cause && entry.kind !== "study") parts.push(element("small", { title: entry.cause }, entry.cause));
  return parts;
}

function build(entry, group) {
  const row = document.createElement("tr");
  row.dataset.name = entry.name;
  row.className = entry.study ? "cell" : entry.kind;
  cell(row, tick(entry), "tick");
  cell(row, "").append(...nameOf(entry, group));
  cell(row, element("span", { className: `status ${entry.status}` }, entry.status));
  if (entry.kind === "study") {
    cell(row, `study, ${entry.cause}`, "note").colSpan = 7;
  } else {
    cell(row, learned(entry), "n");
    cell(row, seconds(entry.iteration_seconds), "n");
    cell(row, entry.iterations === null ? "" : entry.iterations.toLocaleString("en"), "n");
    cell(row, seconds(entry.wall_seconds), "n");
    cell(row, entry.model || entry.script);
    cell(row, entry.strategy);
    cell(row, entry.workers ? String(entry.workers) : "", "n");
  }
  cell(row, ago(entry.changed), "note");
  cell(row, entry.status === "damaged" ? "" : anchor(link("report", entry.name), "report"));
  return row;
}

// The row of an entry, rebuilt only if its data changed.
function rowOf({ entry, group }) {
  const made = JSON.stringify([entry, ago(entry.changed), group && [group.isClosed, group.cells.length]]);
  const known = rows.get(entry.name);
  if (known && known.made === made) return known.row;
  const row = build(entry, group);
  rows.set(entry.name, { made, row });
  return row;
}

// A study is followed by its cells in the order of their runs.
function arrange(shown) {
  const all = new Map(entries.map((entry) => [entry.name, entry]));
  const groups = new Map();
  for (const entry of shown) {
    const head = all.get(entry.study) || entry;
    if (!groups.has(head.name)) groups.set(head.name, { entry: head, cells: [] });
    if (head !== entry) groups.get(head.name).cells.push(entry);
  }
  const lines = [];
  for (const group of groups.values()) {
    const isLong = group.cells.length > MAX_OPEN_CELLS && !filter.value;
    group.isClosed = folded.get(group.entry.name) ?? isLong;
    lines.push({ entry: group.entry, group });
    const cells = group.isClosed ? [] : group.cells.sort((a, b) => a.changed - b.changed);
    lines.push(...cells.map((entry) => ({ entry })));
  }
  return lines;
}

function show(lines) {
  const wanted = lines.map(rowOf);
  const kept = new Set(wanted);
  for (const row of [...body.children]) if (!kept.has(row)) row.remove();
  // Only rows out of order are moved: a row that stays keeps keyboard focus.
  wanted.forEach((row, index) => {
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] || null);
  });
}

function showCompare() {
  compare.disabled = selected.size < 2 || selected.size > MAX_COMPARED;
  compare.title = selected.size > MAX_COMPARED ? `at most ${MAX_COMPARED}` : "";
  compare.textContent = selected.size ? `Compare ${selected.size}` : "Compare";
  remember();
}

function remember() {
  history.replaceState({ selected: [...selected], folded: [...folded], filter: filter.value }, "");
}

function draw() {
  remember();
  if (entries === null) return;
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (one) => `${one.name} ${one.model} ${one.script} ${one.strategy} ${one.status} ${one.kind}`.toLowerCase();
  const shown = entries.filter((one) => words.every((word) => text(one).includes(word)));
  const lines = arrange(shown);
  show(lines.slice(0, MAX_ROWS));
  const runs = entries.filter((one) => one.kind === "run");
  const running = runs.filter((one) => one.status === "running").length;
  count.textContent = `${runs.length.toLocaleString("en")} ${runs.length === 1 ? "run" : "runs"}, ${running} running`;
  table.hidden = !shown.length;
  empty.hidden = shown.length > 0;
  empty.textContent = entries.length
    ? "No run or study matches the filter."
    : "No runs yet. A run appears here as soon as it starts.";
  more.hidden = lines.length <= MAX_ROWS;
  more.textContent = `Showing ${MAX_ROWS.toLocaleString("en")} of ${lines.length.toLocaleString("en")} rows. Use the filter to see others.`;
}

document.getElementById("bar").addEventListener("submit", (event) => {
  event.preventDefault();
  const query = [...selected].map((name) => `run=${encodeURIComponent(name)}`).join("&");
  if (!compare.disabled) window.location.assign(`/compare?${query}`);
});
filter.addEventListener("input", draw);
setInterval(draw, 60000); // Relative times change without an update.

function take(event) {
  entries = JSON.parse(event.data);
  const names = new Set(entries.map((entry) => entry.name));
  for (const known of [rows, selected]) for (const name of known.keys()) if (!names.has(name)) known.delete(name);
  showCompare();
  draw();
}

let source = null;

// A hidden page closes its connection: browsers allow six per server.
function listen() {
  source?.close();
  if (document.hidden) return;
  source = new EventSource("/stream");
  source.addEventListener("message", take);
  source.addEventListener("error", () => {
    count.textContent = "no connection to paceline ui, retrying";
  });
}

document.addEventListener("visibilitychange", listen);
listen();
